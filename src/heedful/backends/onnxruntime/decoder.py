"""ONNX Runtime as a backend of nets that generate: searches of `Searcher`, steps as graphs."""

from pathlib import Path

from heedful.backends.base import Settings
from heedful.backends.manifest import SHORTLIST
from heedful.backends.onnxruntime.cached_net import OnnxNet
from heedful.backends.onnxruntime.facts import OnnxFacts, check_runs
from heedful.backends.torch.graph_generator import GraphGenerator


class OnnxGenerator(GraphGenerator):
    """The ONNX graphs of an encoder-decoder or decoder-only net as a backend; CPU only.

    Args:
        directory: of the graphs.

    Raises:
        UserError: ONNX Runtime is not installed, or cannot open a graph; another device.
    """

    name = "onnxruntime"

    def __init__(
        self,
        directory: Path,
        facts: OnnxFacts,
        precision: str,
        settings: Settings,
        device: str = "cpu",
    ) -> None:
        check_runs(device)
        net = OnnxNet(directory, facts, settings.threads or 1)
        super().__init__(
            net,
            facts.max_length,
            precision,
            settings,
            is_encoder_decoder=net.is_encoder_decoder,
            has_shortlist=(directory.parents[1] / SHORTLIST).is_file(),
        )
