"""What a PyTorch user does first, as the README shows it: one short test for each."""

import torch

import torchloo as tl


def test_probe_on_embeddings(tmp_path):
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
    labels = torch.arange(200) % 4
    images = torch.randn(200, 1, 8, 8, generator=generator)
    images[torch.arange(200), 0, 2 * labels] += 1.5  # a bright row for each class
    embeddings = network(images)  # (200, 144), with its graph
    found = tl.probe(embeddings, labels, progress=False)
    assert found.accuracy > 0.9
    assert 0 < found.standard_error < 0.03
    assert f"{found.accuracy:.4f}" in str(found)
    assert found.head.predict_class(network(images)).shape == (200,)
    found.plot(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").is_file()
