"""What machines, kernels, settings and criteria are called in words."""

__all__ = ["CRITERIA", "KERNELS", "MACHINES", "PARAMETERS"]

MACHINES = {
    "lssvm": "least-squares support vector machine",
    "rls": "regularised least-squares machine",
    "sparse": "sparse least-squares support vector machine",
    "kfd": "kernel Fisher discriminant",
    "svc": "support vector machine",
}

KERNELS = {
    "rbf": "an RBF kernel",
    "ard": "an RBF kernel that has a lengthscale for every input (ARD)",
    "linear": "a linear kernel",
    "poly2": "a quadratic kernel",
    "poly3": "a cubic kernel",
    "boolean": "a Boolean kernel",
    "matern": "a Matérn kernel",
}

PARAMETERS = {
    "reg": "regularisation: how strongly the machine is kept from following single rows",
    "C": "how dearly the machine pays for each row on the wrong side",
    "lengthscale": "how far apart rows may be and still inform one another, in standard deviations",
    "offset": "how much the lower powers of the inputs count",
    "rate": "how much combinations of several inputs count",
}

CRITERIA = {
    "auc": ("AUC", "the area under the ROC curve"),
    "balanced_error_rate": (
        "balanced error rate",
        "the mean of the error rates of a class and of the others",
    ),
    "balanced_multiclass_error": (
        "balanced misclassification rate",
        "the mean over the classes of the share of their rows for which another has the largest output",
    ),
    "cross_entropy": ("cross-entropy", "the mean of -log p, p the softmax of the outputs at the true class"),
    "error_rate": ("error rate", "the share of wrong answers"),
    "hinge": ("hinge loss", "the sum of how far answers fall short of the right side"),
    "kendall_tau": ("Kendall's tau", "how well the order of the rows is told"),
    "leave_pair_out_auc": ("leave-pair-out AUC", "the share of pairs, left out together, in the right order"),
    "log_density": ("log density", "the mean logarithm of the probability given to the truth"),
    "mse": ("mean squared error", "the mean of the squared residuals"),
    "multiclass_error": (
        "misclassification rate (largest output)",
        "the share of rows for which another class than their own has the largest output",
    ),
    "press": ("PRESS", "the sum of the squared residuals"),
    "smooth_error": ("smooth error rate", "the share of wrong answers, near misses counting in part"),
    "smooth_wmw": ("smooth WMW", "the share of pairs put in the wrong order, near misses counting in part"),
    "squared_hinge": ("squared hinge loss", "the sum of the squares by which answers fall short"),
    "wmw": ("WMW", "the share of pairs put in the wrong order"),
}
"""Name and meaning, of what is said of rows that were left out."""
