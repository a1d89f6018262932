//! The parameters of a Llama, with the names of its family in files.

use crate::error::HEAD;
use crate::family::{Family, NormForm};
use crate::table::{HasTable, bias_as, embedding, layer_norm, linear, rms_norm};
use crate::{Llama, LlamaConfig, ParameterSpec};

impl LlamaConfig {
    /// Returns all parameters in the order in which the forward pass uses them.
    ///
    /// Names and shapes match the family's class in Hugging Face's transformers, such as `LlamaForCausalLM`. As there,
    /// rotary positions rotate the two halves of a head against each other, a fused matrix is one parameter, and a tied
    /// head is not a separate parameter.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let names = Names::of(self.variant.family);
        let top = |module: &str| format!("{}.{module}", names.top);
        let mut table = vec![embedding(
            "tok_embeddings",
            &top(names.table),
            self.vocab,
            self.dim,
        )];
        for layer in 0..self.layers {
            Block {
                config: self,
                path: format!("layers.{layer}"),
                name: top(&format!("layers.{layer}")),
            }
            .add_to(&mut table);
        }
        table.extend(self.norm("norm", &top(names.norm), self.dim));
        if !self.variant.has_tied_head {
            table.push(linear("output", names.head, self.vocab, self.dim));
        }
        table
    }

    fn norm(&self, path: &str, name: &str, dim: usize) -> Vec<ParameterSpec> {
        match self.variant.family.norm() {
            NormForm::Layer => layer_norm(path, name, dim).to_vec(),
            NormForm::RootMeanSquare | NormForm::OnePlusScale => vec![rms_norm(path, name, dim)],
        }
    }
}

impl HasTable for Llama {
    fn table(&self) -> Vec<ParameterSpec> {
        self.config().parameters()
    }
}

/// The names of a family's modules outside the blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    /// The name of the model without its head.
    pub(crate) top: &'static str,
    pub(crate) table: &'static str,
    pub(crate) norm: &'static str,
    head: &'static str,
    /// The head's name in files.
    pub(crate) head_name: &'static str,
    /// The embedding's name in files.
    pub(crate) table_name: &'static str,
}

impl Names {
    pub(crate) fn of(family: Family) -> Self {
        match family {
            Family::GptNeox => Self {
                top: "gpt_neox",
                table: "embed_in",
                norm: "final_layer_norm",
                head: "embed_out",
                head_name: "embed_out.weight",
                table_name: "gpt_neox.embed_in.weight",
            },
            _ => Self {
                top: "model",
                table: "embed_tokens",
                norm: "norm",
                head: "lm_head",
                head_name: HEAD,
                table_name: "model.embed_tokens.weight",
            },
        }
    }
}

/// A block, with its path in the module and its name in files.
struct Block<'a> {
    config: &'a LlamaConfig,
    path: String,
    name: String,
}

impl Block<'_> {
    fn add_to(&self, table: &mut Vec<ParameterSpec>) {
        let dim = self.config.dim;
        let family = self.config.variant.family;
        table.extend(self.norm("attention_norm", "input_layernorm", dim));
        self.add_attention(table);
        // Gemma has this name for the norm after attention.
        let (post_name, pre_name) = ("post_attention_layernorm", "pre_feedforward_layernorm");
        if family.has_post_norms() {
            table.extend(self.norm("post_norms.attention", post_name, dim));
            table.extend(self.norm("ffn_norm", pre_name, dim));
        } else {
            table.extend(self.norm("ffn_norm", post_name, dim));
        }
        self.add_mlp(table);
        if family.has_post_norms() {
            table.extend(self.norm("post_norms.ffn", "post_feedforward_layernorm", dim));
        }
    }

    fn add_attention(&self, table: &mut Vec<ParameterSpec>) {
        let config = self.config;
        let variant = &config.variant;
        let (dim, query_dim, kv_dim) = (config.dim, config.query_dim(), config.kv_dim());
        let has_bias = variant.has_qkv_bias();
        let fused = query_dim + 2 * kv_dim;
        let output = match variant.family {
            Family::GptNeox => {
                table.extend(self.linear("wq", "attention.query_key_value", fused, dim, has_bias));
                "attention.dense"
            }
            Family::Phi3 => {
                table.extend(self.linear("wq", "self_attn.qkv_proj", fused, dim, has_bias));
                "self_attn.o_proj"
            }
            _ => {
                table.extend(self.linear("wq", "self_attn.q_proj", query_dim, dim, has_bias));
                table.extend(self.linear("wk", "self_attn.k_proj", kv_dim, dim, has_bias));
                table.extend(self.linear("wv", "self_attn.v_proj", kv_dim, dim, has_bias));
                "self_attn.o_proj"
            }
        };
        if variant.family.has_head_norms() {
            let head_dim = config.head_dim();
            table.extend(self.norm("head_norms.queries", "self_attn.q_norm", head_dim));
            table.extend(self.norm("head_norms.keys", "self_attn.k_norm", head_dim));
        }
        table.extend(self.linear("wo", output, dim, query_dim, variant.biases.attention));
    }

    fn add_mlp(&self, table: &mut Vec<ParameterSpec>) {
        let (dim, hidden) = (self.config.dim, self.config.hidden);
        let has_bias = self.config.variant.biases.mlp;
        let back = match self.config.variant.family {
            Family::GptNeox => {
                table.extend(self.linear("w1", "mlp.dense_h_to_4h", hidden, dim, has_bias));
                "mlp.dense_4h_to_h"
            }
            Family::Phi3 => {
                table.extend(self.linear("w1", "mlp.gate_up_proj", 2 * hidden, dim, has_bias));
                "mlp.down_proj"
            }
            _ => {
                table.extend(self.linear("w1", "mlp.gate_proj", hidden, dim, has_bias));
                table.extend(self.linear("w3", "mlp.up_proj", hidden, dim, has_bias));
                "mlp.down_proj"
            }
        };
        table.extend(self.linear("w2", back, dim, hidden, has_bias));
    }

    fn norm(&self, path: &str, name: &str, dim: usize) -> Vec<ParameterSpec> {
        let (path, name) = (self.in_module(path), self.in_file(name));
        self.config.norm(&path, &name, dim)
    }

    fn linear(
        &self,
        path: &str,
        name: &str,
        into: usize,
        from: usize,
        has_bias: bool,
    ) -> Vec<ParameterSpec> {
        let (path, name) = (self.in_module(path), self.in_file(name));
        let mut specs = vec![linear(&path, &name, into, from)];
        if has_bias {
            specs.push(bias_as(&path, &name, into));
        }
        specs
    }

    fn in_module(&self, path: &str) -> String {
        format!("{}.{path}", self.path)
    }

    fn in_file(&self, name: &str) -> String {
        format!("{}.{name}", self.name)
    }
}
