//! Models of random layers of Burn, in random order, shared, skipped, frozen, tied and adapted.

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::internals::sharding::BaseBits;
use burn_fsdp::recompute;
use proptest::prelude::*;
use proptest::sample::select;

use super::base::Round;
use super::batch::{Shapes, shapes};
use super::layer::{DIM, KINDS, Kind, Layer, VOCAB};
use super::legs::Ranks;
use super::precision::{Halves, cast};
use super::values::{Values, mixed};

/// Tokens and the token that follows each, of shape `[batch, sequence]`.
pub(crate) type Batch = (Tensor<2, Int>, Tensor<2, Int>);

/// The description of a model.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) layers: Vec<Kind>,
    /// True for each frozen layer.
    frozen: Vec<bool>,
    /// Layers that were frozen or unfrozen after the model was created.
    switched: Vec<usize>,
    /// The order of layers: some are used twice, others never.
    route: Vec<Hop>,
    head: Head,
    loss: Loss,
    pub(crate) shapes: Shapes,
    /// Chooses parameters and tokens.
    pub(crate) seed: u64,
    pub(crate) adapters: Option<Adapters>,
    /// The types of the leg that is run.
    pub(crate) halves: Halves,
}

#[derive(Debug, Clone, Copy)]
struct Hop {
    layer: usize,
    is_residual: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Head {
    Linear,
    /// The table of the embedding.
    Tied,
    /// The same, by another field: a clone of it. Plain Burn reads the embedding's.
    Field,
    /// A frozen embedding in front of a trained head.
    BehindFrozen,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    Squares,
    CrossEntropy,
    Smoothed,
    /// Some targets do not count.
    Padded,
}

/// Low-rank adapters of matrices; everything else is frozen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Adapters {
    rank: usize,
    alpha: f64,
    /// True for all matrices except the embedding's and the head's, if there are any.
    of_layers: bool,
}

pub(crate) fn plans() -> impl Strategy<Value = Plan> {
    let layers = prop::collection::vec((select(&KINDS[..]), prop::bool::weighted(0.2)), 1..5);
    let route = prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..6);
    let heads = select(&[Head::Linear, Head::Tied, Head::Field, Head::BehindFrozen][..]);
    let losses = [
        Loss::Squares,
        Loss::CrossEntropy,
        Loss::Smoothed,
        Loss::Padded,
    ];
    let adapters = (1..4_usize, select(&[1.0, 3.0][..]), any::<bool>());
    let adapters = adapters.prop_map(|(rank, alpha, of_layers)| Adapters {
        rank,
        alpha,
        of_layers,
    });
    let chosen = (
        heads,
        select(losses.to_vec()),
        prop::option::weighted(0.15, adapters),
    );
    (layers, route, chosen, shapes(), 0..1000_u64).prop_map(
        |(layers, route, (head, loss, adapters), shapes, seed)| {
            let (layers, frozen): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
            let hop = |(layer, is_residual): (prop::sample::Index, bool)| Hop {
                layer: layer.index(layers.len()),
                is_residual,
            };
            let mut has_norm = false;
            let mut is_first = |hop: &Hop| {
                if layers[hop.layer].norms_few() {
                    !std::mem::replace(&mut has_norm, true)
                } else {
                    true
                }
            };
            let route = route.into_iter().map(hop).filter(|hop| is_first(hop));
            Plan {
                route: route.collect(),
                layers,
                frozen,
                switched: Vec::new(),
                // No adapter may be on it.
                head: match head {
                    Head::Field if adapters.is_some() => Head::Tied,
                    head => head,
                },
                loss,
                shapes,
                seed,
                adapters,
                halves: Halves::default(),
            }
        },
    )
}

#[derive(Module, Debug)]
pub(crate) struct Net {
    embed: Embedding,
    layers: Vec<Layer>,
    head: Option<Linear>,
    table: Option<Table>,
}

/// Another field for the table of the embedding.
#[derive(Module, Debug)]
struct Table {
    weight: Param<Tensor<2>>,
}

impl Net {
    /// Makes dropout active in training; an evaluated model has none.
    pub(crate) fn dropping(mut self) -> Self {
        for layer in &mut self.layers {
            if let Layer::Dropout(dropout) = layer {
                dropout.prob = 0.5;
            }
        }
        self
    }
}

impl Plan {
    /// Builds the model, with the same values for every call.
    pub(crate) fn init(&self, device: &Device) -> Net {
        self.init_nudged(device, 0, 0.0)
    }

    /// Builds the model with elements that differ by small multiples of `rounding`. Each number of a nudge has other
    /// differences, and 0 has none.
    pub(crate) fn init_nudged(&self, device: &Device, nudge: u64, rounding: f32) -> Net {
        let net = self.init_without_adapters(device, nudge, rounding);
        match self.lora() {
            Some(lora) => {
                let net = match self.base_bits() {
                    // Elements that differ would be other levels.
                    Some(bits) => self.init_without_adapters(device, 0, 0.0).map(&mut Round {
                        bits,
                        lora: lora.clone(),
                        path: Vec::new(),
                    }),
                    None => net,
                };
                let factors = Values::new(self.seed + 100, nudge, rounding).of_factors();
                net.apply_lora(lora).map(&mut { factors })
            }
            None => net,
        }
    }

    pub(crate) fn init_without_adapters(&self, device: &Device, nudge: u64, rounding: f32) -> Net {
        let layers = self.layers.iter().zip(&self.frozen);
        let layers = layers.map(|(kind, is_frozen)| match is_frozen {
            true => kind.init(device).freeze(),
            false => kind.init(device),
        });
        let embed = EmbeddingConfig::new(VOCAB, DIM).init(device);
        let net = Net {
            embed: match self.head {
                Head::BehindFrozen => embed.freeze(),
                _ => embed,
            },
            layers: layers.collect(),
            head: match self.head {
                Head::Tied | Head::Field => None,
                _ => Some(LinearConfig::new(DIM, VOCAB).init(device)),
            },
            table: None,
        };
        let mut net = net.map(&mut Values::new(self.seed, nudge, rounding));
        net.table = (self.head == Head::Field).then(|| Table {
            weight: net.embed.weight.clone(),
        });
        self.switched(net)
    }

    /// Returns the description of the same model with one field for what several share, which is read for each of them.
    pub(crate) fn without_fields(&self) -> Self {
        let mut plan = self.clone();
        if plan.head == Head::Field {
            plan.head = Head::Tied;
        }
        plan
    }

    /// Returns the bits of the matrices that adapters adapt, if they do not keep their type.
    pub(crate) fn base_bits(&self) -> Option<BaseBits> {
        self.adapters?;
        // Not drawn, so seeds still give the same cases.
        match self.seed % 3 {
            0 => None,
            1 => Some(BaseBits::Eight),
            _ => Some(BaseBits::Four),
        }
    }

    /// Returns the configuration of the adapters.
    pub(crate) fn lora(&self) -> Option<Lora> {
        let Adapters {
            rank,
            alpha,
            of_layers,
        } = self.adapters?;
        let lora = Lora::new(rank, alpha);
        let matrices = self.shapes_without_adapters();
        // If no batch reaches a factor, a loss has no gradient.
        let is_taken = |path: &str| {
            let mut hops = self.route.iter();
            hops.any(|hop| path.starts_with(&format!("layers.{}.", hop.layer)))
        };
        let has_own = |(path, shape): &(String, Vec<usize>)| is_taken(path) && shape.len() == 2;
        Some(if of_layers && matrices.iter().any(has_own) {
            lora.set_param_group(ParamGroup::from_predicate("layers"))
        } else {
            lora
        })
    }

    /// Returns the paths of all parameters of two dims.
    pub(crate) fn matrices(&self) -> Vec<String> {
        let all = shapes_of(&self.init(&Device::flex()));
        let matrices = all.into_iter().filter(|(_, shape)| shape.len() == 2);
        matrices.map(|(path, _)| path).collect()
    }

    fn shapes_without_adapters(&self) -> Vec<(String, Vec<usize>)> {
        shapes_of(&self.init_without_adapters(&Device::flex(), 0, 0.0))
    }

    /// Returns true if a pattern of units, as they are drawn, matches a module with parameters.
    pub(crate) fn has_units(&self, pattern: &str) -> bool {
        match pattern {
            "head" => self.has_head(),
            "embed" => true,
            "table" => self.head == Head::Field,
            "layers.0" => self.has_params(0),
            "**" => true,
            _ => (0..self.layers.len()).any(|layer| self.has_params(layer)),
        }
    }

    /// Returns true if the layer has parameters, or states.
    pub(crate) fn has_params(&self, layer: usize) -> bool {
        self.layers[layer] != Kind::Dropout
    }

    /// Returns true if statistics of batches are kept.
    pub(crate) fn has_running_states(&self) -> bool {
        self.layers.contains(&Kind::BatchNorm)
    }

    /// Returns parameters to cut, each with the axis of a grid of ranks and a dim: some of those that can be cut
    /// evenly.
    pub(crate) fn cuts(&self, ranks: Ranks, salt: u64) -> Vec<(String, &'static str, usize)> {
        let Ranks::Grid(data, model, depth) = ranks else {
            return Vec::new();
        };
        let choices = shapes_of(&self.init(&Device::flex()));
        let choices = choices.into_iter().enumerate();
        let is_running = |path: &str| path.contains("running");
        let choices = choices.filter(|(_, (path, _))| !is_running(path));
        let cut = |(index, (path, shape)): (usize, (String, Vec<usize>))| {
            let drawn = mixed(salt * 1000 + index as u64);
            let (axis, parts) = match drawn % 5 {
                0..3 => ("model", model),
                3 => ("data", data),
                _ => return Vec::new(),
            };
            let dim = |drawn: u64| drawn as usize % shape.len();
            let (first, second) = (dim(drawn >> 8), dim(drawn >> 16));
            let fits = shape[first] >= parts;
            let mut cuts = if fits {
                vec![(path.clone(), axis, first)]
            } else {
                Vec::new()
            };
            // Two axes that cut one dim are refused by name.
            let is_free = (first != second || !fits) && shape[second] >= depth;
            if depth > 1 && drawn >> 24 & 1 == 0 && is_free {
                cuts.push((path, "depth", second));
            }
            cuts
        };
        choices.flat_map(cut).collect()
    }

    /// Returns true if these are the paths of all parameters.
    pub(crate) fn are_all_cut(&self, paths: &[&String]) -> bool {
        let all = shapes_of(&self.init(&Device::flex()));
        let all = all.iter().filter(|(path, _)| !path.contains("running"));
        all.count() == paths.len()
    }

    /// Freezes a layer that is trained, and trains one that is frozen. With adapters, everything else is
    /// frozen.
    pub(crate) fn switch(&mut self, layer: usize) {
        if self.adapters.is_some() {
            return;
        }
        let layer = layer % self.layers.len();
        self.frozen[layer] = !self.frozen[layer];
        self.switched.push(layer);
    }

    /// Returns `net` with the switched layers in their current state.
    pub(crate) fn switched(&self, mut net: Net) -> Net {
        for &index in &self.switched {
            let layer = net.layers.remove(index);
            let layer = if self.frozen[index] {
                layer.freeze()
            } else {
                layer.unfreeze()
            };
            net.layers.insert(index, layer);
        }
        net
    }

    /// Returns the number of layers that a batch passes.
    pub(crate) fn num_hops(&self) -> usize {
        self.route.len()
    }

    pub(crate) fn has_head(&self) -> bool {
        !matches!(self.head, Head::Tied | Head::Field)
    }

    /// Returns the mean loss of a batch, and calls a function before each layer.
    pub(crate) fn loss(&self, net: &Net, batch: Batch, before_each: impl Fn()) -> Tensor<1> {
        self.loss_by(net, batch, |layer, x, tokens| {
            before_each();
            layer.forward(x, tokens)
        })
    }

    /// As [`loss`](Self::loss), with the operations that Burn does not support in halves written out.
    pub(crate) fn loss_by_hand(&self, net: &Net, batch: Batch) -> Tensor<1> {
        self.loss_by(net, batch, Layer::forward_by_hand)
    }

    /// Returns true if layers with states may compute in halves in compiled steps. A recurrent layer does if the loss
    /// creates no tensors of the device's type.
    pub(crate) fn may_have_states(&self) -> bool {
        let is_recurrent = self.layers.iter().any(|kind| kind.is_recurrent());
        !is_recurrent || self.loss == Loss::CrossEntropy
    }

    /// As [`loss`](Self::loss), with every layer recomputed in backward.
    pub(crate) fn loss_recomputed(
        &self,
        net: &Net,
        batch: Batch,
        before_each: impl Fn(),
    ) -> Tensor<1> {
        self.loss_by(net, batch, |layer, x, tokens| {
            before_each();
            let tokens = tokens.clone();
            recompute(layer, x, move |layer: &Layer, x| layer.forward(x, &tokens))
        })
    }

    fn loss_by(
        &self,
        net: &Net,
        (tokens, targets): Batch,
        forward: impl Fn(&Layer, Tensor<3>, &Tensor<2, Int>) -> Tensor<3>,
    ) -> Tensor<1> {
        let halves = self.halves;
        let stream = halves.of_embedding();
        let mut x = net.embed.forward(tokens.clone());
        for hop in &self.route {
            let y = cast(x.clone(), halves.of_layer(self, hop.layer));
            let y = cast(forward(&net.layers[hop.layer], y, &tokens), stream).tanh();
            x = if hop.is_residual { x + y } else { y };
        }
        let x = cast(x, halves.of_head(self));
        let logits = match (&net.head, &net.table) {
            (Some(head), _) => head.forward(x),
            (None, Some(table)) => x.matmul(table.weight.val().transpose().unsqueeze()),
            (None, None) => x.matmul(net.embed.weight.val().transpose().unsqueeze()),
        };
        let logits = cast(
            logits,
            halves.compute.map(|_| burn::tensor::FloatDType::F32),
        );
        let device = logits.device();
        let [rows, length, vocab] = logits.dims();
        let logits = logits.reshape([rows * length, vocab]) * 2.0;
        let targets = targets.reshape([rows * length]);
        let entropy = CrossEntropyLossConfig::new();
        match self.loss {
            Loss::Squares => {
                let wanted = targets.float().reshape([rows * length, 1]) / VOCAB as f32;
                (logits - wanted).powf_scalar(2.0).mean()
            }
            Loss::CrossEntropy => entropy.init(&device).forward(logits, targets),
            Loss::Smoothed => {
                let entropy = entropy.with_smoothing(Some(0.1));
                entropy.init(&device).forward(logits, targets)
            }
            Loss::Padded => {
                let entropy = entropy.with_pad_tokens(Some(vec![3]));
                entropy.init(&device).forward(logits, targets)
            }
        }
    }
}

/// Returns the path and the shape of each parameter, once, and of each running state.
fn shapes_of(net: &Net) -> Vec<(String, Vec<usize>)> {
    struct Shapes(Vec<String>, Vec<(String, Vec<usize>)>);
    impl ModuleVisitor for Shapes {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push((self.0.join("."), param.dims().to_vec()));
        }
    }
    let mut shapes = Shapes(Vec::new(), Vec::new());
    net.visit(&mut shapes);
    shapes.1.retain(|(path, _)| path != "table.weight");
    shapes.1
}
