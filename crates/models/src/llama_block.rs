//! A block of a Llama.

use burn::module::Module;
use burn::nn::{Initializer, Linear};
use burn::tensor::activation::{gelu_approximate, relu, sigmoid, silu};
use burn::tensor::{Device, Tensor};
use burn_fsdp_kernels::{causal_attention, gelu};

use crate::LlamaConfig;
use crate::family::FusedOrder;
use crate::initial::InitialValues;
use crate::key_values::{Heads, KeyValues, Scores, attend_before, attend_within};
use crate::llama_config::INIT_STD;
use crate::llama_variant::Activation;
use crate::norm::Norm;
use crate::positions::{DocumentParts, Positions};
use crate::rotary::Rotary;

/// A transformer block: attention and an MLP. Each follows a norm and is added to the residual stream.
#[derive(Module, Debug)]
pub struct LlamaBlock {
    attention_norm: Norm,
    /// The queries, or queries, keys and values in one matrix.
    wq: Linear,
    wk: Option<Linear>,
    wv: Option<Linear>,
    head_norms: Option<HeadNorms>,
    wo: Linear,
    ffn_norm: Norm,
    /// The gate, the gate fused with the projection that it multiplies, or the only projection of an MLP without a
    /// gate.
    w1: Linear,
    /// The projection back to the residual stream.
    w2: Linear,
    /// The projection that the gate multiplies.
    w3: Option<Linear>,
    post_norms: Option<PostNorms>,
    #[module(skip)]
    form: BlockForm,
}

/// The norms of each head's queries and keys.
#[derive(Module, Debug)]
struct HeadNorms {
    queries: Norm,
    keys: Norm,
}

/// The norms of the results of attention and MLP.
#[derive(Module, Debug)]
struct PostNorms {
    attention: Norm,
    ffn: Norm,
}

/// The configuration of a block.
#[derive(Debug, Clone, Copy)]
struct BlockForm {
    sizes: LlamaConfig,
    /// The number of tokens that a query sees, including its own. `None` for all.
    window: Option<usize>,
}

/// The values that all blocks share in a forward.
#[derive(Debug, Clone)]
pub struct LlamaShared {
    batch: usize,
    rotary: Rotary,
    /// The positions in layers with a sliding window, if they differ.
    local: Option<Rotary>,
    /// The documents of the sequences, if they have several.
    documents: Option<DocumentParts>,
}

impl LlamaShared {
    pub(crate) fn new(
        sizes: &LlamaConfig,
        batch: usize,
        positions: Positions<'_>,
        device: &Device,
    ) -> Self {
        let local = Rotary::local(sizes, positions, device);
        let rotary = Rotary::new(sizes, positions, device);
        Self {
            batch,
            rotary,
            local,
            documents: DocumentParts::of(positions),
        }
    }
}

impl LlamaBlock {
    pub(crate) fn new(config: &LlamaConfig, layer: usize, values: &mut InitialValues<'_>) -> Self {
        let device = values.device();
        let variant = &config.variant;
        let family = variant.family;
        let (dim, hidden) = (config.dim, config.hidden);
        let (query_dim, kv_dim) = (config.query_dim(), config.kv_dim());
        let (has_qkv_bias, biases) = (variant.has_qkv_bias(), variant.biases);
        let norm = |dim| Norm::new(config, dim, device);
        let is_apart = family.fused().is_none();
        let first = if is_apart {
            query_dim
        } else {
            query_dim + 2 * kv_dim
        };
        let (wide, has_up) = match (family.is_gated(), family.has_fused_gate()) {
            (true, true) => (2 * hidden, false),
            (is_gated, _) => (hidden, is_gated),
        };
        let mut linear = |from, into, has_bias| linear(values, from, into, has_bias);
        // The order of these fields determines the initial values of a seed.
        Self {
            attention_norm: norm(dim),
            wq: linear(dim, first, has_qkv_bias),
            wk: is_apart.then(|| linear(dim, kv_dim, has_qkv_bias)),
            wv: is_apart.then(|| linear(dim, kv_dim, has_qkv_bias)),
            head_norms: family.has_head_norms().then(|| HeadNorms {
                queries: norm(config.head_dim()),
                keys: norm(config.head_dim()),
            }),
            wo: linear(query_dim, dim, biases.attention),
            ffn_norm: norm(dim),
            w1: linear(dim, wide, biases.mlp),
            w2: linear(hidden, dim, biases.mlp),
            w3: has_up.then(|| linear(dim, hidden, biases.mlp)),
            post_norms: family.has_post_norms().then(|| PostNorms {
                attention: norm(dim),
                ffn: norm(dim),
            }),
            form: BlockForm {
                sizes: *config,
                window: variant.scores.window.of_layer(layer),
            },
        }
    }

    /// Runs the block on the residual stream `[batch * time, dim]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        shared: &LlamaShared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        let attended = self.attend(self.attention_norm.forward(x.clone()), shared, cache);
        if self.form.sizes.variant.is_parallel {
            return self.mlp(self.ffn_norm.forward(x.clone())) + attended + x;
        }
        let (attended, after) = match &self.post_norms {
            Some(norms) => (norms.attention.forward(attended), Some(&norms.ffn)),
            None => (attended, None),
        };
        let x = x + attended;
        let wide = self.mlp(self.ffn_norm.forward(x.clone()));
        match after {
            Some(norm) => x + norm.forward(wide),
            None => x + wide,
        }
    }

    fn mlp(&self, x: Tensor<2>) -> Tensor<2> {
        let variant = &self.form.sizes.variant;
        let activated = |x| activated(variant.activation, x);
        let wide = match &self.w3 {
            Some(up) => activated(self.w1.forward(x.clone())) * up.forward(x),
            None if variant.family.has_fused_gate() => {
                let both = self.w1.forward(x);
                let hidden = self.form.sizes.hidden;
                let gate = both.clone().narrow(1, 0, hidden);
                activated(gate) * both.narrow(1, hidden, hidden)
            }
            None => activated(self.w1.forward(x)),
        };
        self.w2.forward(wide)
    }

    fn attend(
        &self,
        x: Tensor<2>,
        shared: &LlamaShared,
        cache: Option<&mut KeyValues>,
    ) -> Tensor<2> {
        let BlockForm { sizes, window } = self.form;
        let new = self.heads(x, shared.batch);
        let rotary = match (&shared.local, window) {
            (Some(local), Some(_)) => local,
            _ => &shared.rotary,
        };
        let choices = &sizes.variant.scores;
        let scores = Scores {
            scale: choices
                .query_scalar
                .unwrap_or(sizes.head_dim() as f64)
                .sqrt()
                .recip(),
            softcap: choices.softcap,
            window,
        };
        let new = Heads {
            queries: rotary.apply(new.queries),
            keys: rotary.apply(new.keys),
            values: new.values,
        };
        let attended = match cache {
            Some(cache) => cache.attend(new, scores),
            None => self.attend_all(new, scores, shared),
        };
        self.wo.forward(attended)
    }

    /// Returns the queries, keys and values of all heads before their rotation.
    fn heads(&self, x: Tensor<2>, batch: usize) -> Heads {
        let sizes = &self.form.sizes;
        let (heads, kv_heads) = (sizes.heads, sizes.kv_heads);
        let new = match (&self.wk, &self.wv) {
            (Some(wk), Some(wv)) => Heads {
                queries: split(self.wq.forward(x.clone()), batch, heads),
                keys: split(wk.forward(x.clone()), batch, kv_heads),
                values: split(wv.forward(x), batch, kv_heads),
            },
            _ => self.fused_heads(self.wq.forward(x), batch),
        };
        match &self.head_norms {
            Some(norms) => Heads {
                queries: norms.queries.forward(new.queries),
                keys: norms.keys.forward(new.keys),
                values: new.values,
            },
            None => new,
        }
    }

    /// Splits the output of a fused matrix into queries, keys and values.
    fn fused_heads(&self, packed: Tensor<2>, batch: usize) -> Heads {
        let sizes = &self.form.sizes;
        let (heads, kv_heads, head_dim) = (sizes.heads, sizes.kv_heads, sizes.head_dim());
        if sizes.variant.family.fused() == Some(FusedOrder::Heads) {
            let all = split(packed, batch, heads);
            let part = |index: usize| all.clone().narrow(3, index * head_dim, head_dim);
            return Heads {
                queries: part(0),
                keys: part(1),
                values: part(2),
            };
        }
        let (query_dim, kv_dim) = (sizes.query_dim(), sizes.kv_dim());
        let part =
            |start, width, heads| split(packed.clone().narrow(1, start, width), batch, heads);
        Heads {
            queries: part(0, query_dim, heads),
            keys: part(query_dim, kv_dim, kv_heads),
            values: part(query_dim + kv_dim, kv_dim, kv_heads),
        }
    }

    /// Computes the attention over whole sequences.
    fn attend_all(&self, new: Heads, scores: Scores, shared: &LlamaShared) -> Tensor<2> {
        let time = new.queries.dims()[1];
        let is_cut = scores.window.is_some_and(|window| window < time);
        let heads = self.form.sizes.heads;
        // A window that is longer than the sequences also counts for documents, so the graph of a step does not depend on
        // their length.
        let window = scores.window;
        match &shared.documents {
            Some(documents) if scores.softcap.is_some() => {
                attend_within(new, scores, documents.hidden(window))
            }
            Some(documents) => documents.attend(self.packed(new, scores), heads, window),
            None if is_cut || scores.softcap.is_some() => attend_before(new, scores),
            None => causal_attention(self.packed(new, scores), shared.batch, heads),
        }
    }

    /// Returns queries, keys and values side by side, as the kernels expect them: `[batch * time, 3 * dim]`.
    fn packed(&self, new: Heads, scores: Scores) -> Tensor<2> {
        let sizes = &self.form.sizes;
        let group = sizes.heads / sizes.kv_heads;
        let (keys, values) = (repeat(new.keys, group), repeat(new.values, group));
        // The kernel's scale follows from the number of elements of a head.
        let queries = match sizes.variant.scores.query_scalar {
            Some(_) => {
                let scale = scores.scale * (sizes.head_dim() as f64).sqrt();
                new.queries.mul_scalar(scale)
            }
            None => new.queries,
        };
        let parts = [queries, keys, values].map(merge);
        Tensor::cat(parts.to_vec(), 1)
    }
}

fn activated(activation: Activation, x: Tensor<2>) -> Tensor<2> {
    match activation {
        Activation::Silu => silu(x),
        Activation::Gelu => gelu(x),
        Activation::GeluTanh => gelu_approximate(x),
        Activation::QuickGelu => x.clone() * sigmoid(x.mul_scalar(1.702)),
        Activation::Relu => relu(x),
        Activation::Relu2 => relu(x).square(),
    }
}

pub(crate) fn linear(
    values: &mut InitialValues<'_>,
    from: usize,
    into: usize,
    has_bias: bool,
) -> Linear {
    Linear {
        weight: values.normal([from, into], INIT_STD),
        bias: has_bias.then(|| Initializer::Zeros.init([into], values.device())),
    }
}

/// Turns `[batch * time, heads * head_dim]` into `[batch, time, heads, head_dim]`.
fn split(x: Tensor<2>, batch: usize, heads: usize) -> Tensor<4> {
    let [rows, width] = x.dims();
    x.reshape([batch, rows / batch, heads, width / heads])
}

/// Undoes [`split`].
fn merge(x: Tensor<4>) -> Tensor<2> {
    let [batch, time, heads, head_dim] = x.dims();
    x.reshape([batch * time, heads * head_dim])
}

/// Repeats every head, side by side, once for each query head that shares it.
fn repeat(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [batch, time, heads, head_dim] = x.dims();
    if times == 1 {
        return x;
    }
    x.unsqueeze_dim::<5>(3)
        .expand([batch, time, heads, times, head_dim])
        .reshape([batch, time, heads * times, head_dim])
}
