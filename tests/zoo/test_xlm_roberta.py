"""XLM-RoBERTa against transformers: heads, positions, padding, import and export, sizes."""

from dataclasses import replace

from test_roberta import ROBERTA

from encoder_parity import BertParityTests, Poolerless
from hf_parity import millions, transformers

XLM_ROBERTA = replace(
    ROBERTA,
    name="xlm_roberta",
    hf_config=transformers.XLMRobertaConfig,
    hf_class=transformers.XLMRobertaForMaskedLM,
    classify_class=transformers.XLMRobertaForSequenceClassification,
    base_class=Poolerless(transformers.XLMRobertaModel),
    configs=ROBERTA.configs[1:2],
    missing_key_values={**ROBERTA.missing_key_values, "vocab_size": 30522},
    other_class="XLMRobertaForCausalLM",
    published={"base": millions(278.3), "large": millions(560.1)},
    counted=transformers.XLMRobertaForMaskedLM,
)


class TestParity(BertParityTests):
    case = XLM_ROBERTA
