"""digits_app: a Flower / PyTorch app."""

import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

TEST = 360  # of the 1,797 images, the last ones


class Net(nn.Module):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv(x)))
        x = torch.relu(self.hidden(x.flatten(1)))
        return self.output(x)


def load_images(own):
    """Return some of the images as a data set of Hugging Face's kind, with two columns."""
    images, labels = load_digits(return_X_y=True)
    return Dataset.from_dict({"image": images[own].tolist(), "label": labels[own].tolist()})


def apply_transforms(batch):
    """Make tensors with values from 0 to 1 of a batch's images."""
    images = [torch.tensor(image).reshape(1, 8, 8) / 16 for image in batch["image"]]
    return {**batch, "image": images}


def load_data(partition_id, num_partitions, batch_size):
    """Load one node's part: 80 % to train on, 20 % to evaluate on."""
    partitioner = IidPartitioner(num_partitions)
    partitioner.dataset = load_images(slice(None, -TEST))
    parts = partitioner.load_partition(partition_id).train_test_split(test_size=0.2, seed=42)
    parts = parts.with_transform(apply_transforms)
    trainloader = DataLoader(parts["train"], batch_size=batch_size, shuffle=True)
    return trainloader, DataLoader(parts["test"], batch_size=batch_size)


def load_centralized_dataset():
    """Load the test set."""
    test_set = load_images(slice(-TEST, None)).with_transform(apply_transforms)
    return DataLoader(test_set, batch_size=128)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set; return its mean loss."""
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    losses = []
    for _ in range(epochs):
        for batch in trainloader:
            optimizer.zero_grad()
            outputs = net(batch["image"].to(device))
            loss = nn.functional.cross_entropy(outputs, batch["label"].to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, testloader, device):
    """Return loss and accuracy on a test set."""
    net.to(device)
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for batch in testloader:
            outputs, labels = net(batch["image"].to(device)), batch["label"].to(device)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
    count = len(testloader.dataset)
    return loss / count, correct / count
