//! The settings of a `config.json` that do not change what a decoder computes.

use serde_json::{Value, json};

use crate::settings::{Settings, shown};

/// Settings of training, generation, tokenizers and files, and records of how a model was made. They do not affect what
/// transformers' decoders compute.
const HARMLESS: [&str; 92] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "attn_pdrop",
    "author",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "created_date",
    "custom_pipelines",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "license",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "model_type",
    "n_ctx",
    "n_special",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "predict_special_tokens",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Returns the value with which a setting has no effect, if there is one.
fn neutral(name: &str) -> Option<Value> {
    match name {
        "add_cross_attention"
        | "is_encoder_decoder"
        | "lm_head_bias"
        | "rope_interleaved"
        | "use_bfloat16"
        | "use_bidirectional_attention"
        | "use_mrope"
        | "use_sliding_window" => Some(json!(false)),
        "attention_bias" | "mlp_bias" => Some(json!(false)),
        "full_attn_mod" | "interpolate_factor" | "partial_rotary_factor" => Some(json!(1)),
        "pruned_heads" => Some(json!({})),
        _ => None,
    }
}

/// Checks that each setting is read by the caller, is known to have no effect, or is null.
pub(crate) fn check(model: &str, settings: Settings<'_>, read: &[&str]) -> Result<(), String> {
    let is_known = |name: &str, value: &Value| {
        value.is_null()
            || read.contains(&name)
            || HARMLESS.binary_search(&name).is_ok()
            || neutral(name).is_some_and(|neutral| crate::settings::is_same(&neutral, value))
    };
    match settings.all().find(|(name, value)| !is_known(name, value)) {
        None => Ok(()),
        Some((name, value)) => Err(format!(
            "`{name}` is {}, a setting that this {model} does not know and that may change what it computes; remove it \
             if it has no effect, or write the model as your own Burn module",
            shown(value)
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_settings_are_named_with_their_values() {
        assert!(HARMLESS.is_sorted());
        let of = |json: &Value| {
            let settings = Settings::of(json.as_object().expect("an object"));
            check("Llama", settings, &["hidden_size"])
        };
        let harmless = json!({
            "hidden_size": 3, "use_cache": true, "interpolate_factor": 1.0, "is_encoder_decoder": false, "new": null
        });
        assert_eq!(of(&harmless), Ok(()));
        for (json, word) in [
            (json!({"logit_scale": 0.5}), "`logit_scale` is 0.5"),
            (
                json!({"interpolate_factor": 2}),
                "`interpolate_factor` is 2",
            ),
            (
                json!({"is_encoder_decoder": true}),
                "`is_encoder_decoder` is true",
            ),
        ] {
            let problem = of(&json).expect_err(word);
            assert!(
                problem.contains(word) && problem.contains("remove it"),
                "{problem}"
            );
        }
    }
}
