//! The optimizers of a run: their kinds, their parameters, and their hyperparameters.

use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, LionConfig, MuonConfig, Optimizer,
    RmsPropConfig, SgdConfig,
};
use burn_fsdp::compile::OptimizerGroups;
use burn_fsdp::internals::mesh::Pattern;
use burn_fsdp::internals::optim::SealedOptimizer;
use burn_fsdp_models::{Architecture, ModelConfig, ParameterSpec};
use serde_json::{Map, Value, json};

use crate::args::{OptimizerArgs, OptimizerName, TrainArgs};
use crate::error::InputError;

/// Name of the setting that identifies the optimizer of a step.
pub(crate) const OPTIMIZER: &str = "--optimizer";
/// Name of the setting for parameters without weight decay.
pub(crate) const NO_DECAY: &str = "--no-decay";
/// The pattern for all one-dimensional parameters.
const VECTORS: &str = "vectors";

/// The optimizers of a run.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    name: OptimizerName,
    numbers: Numbers,
    /// The parameters without weight decay, as specified by the user.
    no_decay: Vec<String>,
    /// All parameters of the model, without adapters.
    members: Vec<Member>,
}

/// The hyperparameters of an optimizer. Those that it does not have are ignored.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    beta1: f32,
    beta2: f32,
    eps: f32,
    momentum: f32,
    weight_decay: f32,
}

/// A parameter of the model.
#[derive(Debug, Clone)]
struct Member {
    path: String,
    elements: usize,
    /// True for a matrix in a block, which Muon updates.
    is_matrix: bool,
    decays: bool,
}

impl Numbers {
    /// Returns the default hyperparameters of an optimizer.
    fn of(name: OptimizerName) -> Self {
        use OptimizerName::{Adam, Adamw, Adan, Lion, Muon, Rmsprop, Sgd};
        Self {
            beta1: if name == Adan { 0.98 } else { 0.9 },
            beta2: match name {
                Lion | Rmsprop => 0.99,
                Adan => 0.92,
                _ => 0.999,
            },
            eps: 1e-8,
            momentum: match name {
                Sgd => 0.9,
                Muon => 0.95,
                _ => 0.0,
            },
            weight_decay: match name {
                Adamw | Muon => 0.01,
                Adam | Sgd | Rmsprop | OptimizerName::Adagrad | Adan | Lion => 0.0,
            },
        }
    }
}

/// The optimizers with these hyperparameters.
impl Numbers {
    /// Returns the weight decay that Burn adds to gradients, or that Muon applies. Returns `None` if it is 0.
    fn decay(self) -> Option<WeightDecayConfig> {
        (self.weight_decay > 0.0).then(|| WeightDecayConfig::new(self.weight_decay))
    }

    /// Returns PyTorch's momentum, without dampening.
    fn moving(self) -> MomentumConfig {
        let momentum = MomentumConfig::new().with_momentum(f64::from(self.momentum));
        momentum.with_dampening(0.0)
    }

    /// As in PyTorch, weight decay is decoupled and scaled by the learning rate.
    fn adamw(self) -> impl Optimizer {
        AdamWConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.eps)
            .with_weight_decay(self.weight_decay)
            .with_cautious_weight_decay(false)
            .with_amsgrad(false)
            .build()
    }

    fn adam(self) -> impl Optimizer {
        AdamConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.eps)
            .with_weight_decay(self.decay())
            .build()
    }

    fn sgd(self) -> impl Optimizer {
        SgdConfig::new()
            .with_momentum((self.momentum > 0.0).then(|| self.moving()))
            .with_weight_decay(self.decay())
            .build()
    }

    fn rmsprop(self) -> impl Optimizer {
        RmsPropConfig::new()
            .with_alpha(self.beta2)
            .with_momentum(self.momentum)
            .with_epsilon(self.eps)
            .with_weight_decay(self.decay())
            .build()
    }

    fn adagrad(self) -> impl Optimizer {
        AdaGradConfig::new()
            .with_epsilon(self.eps)
            .with_weight_decay(self.decay())
            .build()
    }

    fn adan(self) -> impl Optimizer {
        AdanConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.eps)
            .with_weight_decay(self.weight_decay)
            .build()
    }

    fn lion(self) -> impl Optimizer {
        LionConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_weight_decay(self.weight_decay)
            .build()
    }

    fn muon(self) -> impl Optimizer {
        MuonConfig::new()
            .with_momentum(self.moving().with_nesterov(true))
            .with_weight_decay(self.decay())
            .build()
    }
}

/// Returns true if an optimizer has the hyperparameter of this flag.
fn has(name: OptimizerName, flag: &str) -> bool {
    use OptimizerName::{Adam, Adamw, Adan, Lion, Muon, Rmsprop, Sgd};
    match flag {
        "--beta1" => matches!(name, Adamw | Adam | Adan | Lion | Muon),
        "--beta2" => matches!(name, Adamw | Adam | Adan | Lion | Muon | Rmsprop),
        "--eps" => !matches!(name, Sgd | Lion),
        "--momentum" => matches!(name, Sgd | Rmsprop | Muon),
        _ => true,
    }
}

impl Recipe {
    /// Resolves and checks the flags for a model.
    pub(crate) fn new(args: &TrainArgs, model: &ModelConfig) -> Result<Self, InputError> {
        let given = &args.training.optimizer;
        let name = given.optimizer;
        check_rate(args.training.lr)?;
        let numbers = numbers(given)?;
        let table = match model {
            ModelConfig::Gpt(sizes) => table(*sizes),
            ModelConfig::Llama(sizes) => table(*sizes),
            ModelConfig::Gpt2(sizes) => table(*sizes),
        };
        let excludes = |first, second, reason| {
            Err(InputError::Excludes {
                first,
                second,
                reason,
            })
        };
        if !given.no_decay.is_empty() && numbers.weight_decay == 0.0 {
            return excludes(NO_DECAY, "a --weight-decay of 0", "no parameter decays");
        }
        if let Some(flag) = args.model.lora.flag() {
            if !given.no_decay.is_empty() {
                let reason = "only adapters are trained, and they are matrices";
                return excludes(NO_DECAY, flag, reason);
            }
            if name == OptimizerName::Muon {
                let reason = "it updates the matrices of blocks, which are frozen";
                return excludes(name.flag(), flag, reason);
            }
        }
        let undecayed = undecayed(&given.no_decay, &table)?;
        let members = table.into_iter().map(|(spec, is_in_block)| Member {
            elements: spec.shape.iter().product(),
            is_matrix: is_in_block && spec.shape.len() == 2,
            decays: !undecayed.contains(&spec.path),
            path: spec.path,
        });
        Ok(Self {
            name,
            numbers,
            no_decay: given.no_decay.clone(),
            members: members.collect(),
        })
    }

    /// Returns the optimizers of all groups of parameters.
    pub(crate) fn groups(&self) -> OptimizerGroups {
        self.joined(false)
    }

    /// Returns the same optimizers with checksums on the state that they keep.
    pub(crate) fn sealed(&self) -> OptimizerGroups {
        self.joined(true)
    }

    fn joined(&self, seals: bool) -> OptimizerGroups {
        use OptimizerName::{Adamw, Muon};
        let rest = match self.name {
            Muon => Adamw,
            name => name,
        };
        let decay = self.numbers.weight_decay;
        let mut groups = self.with(None, ParamGroup::all(), (rest, decay), seals);
        for (name, decays) in [(Muon, true), (Muon, false), (rest, false)] {
            let members = self.members.iter().filter(|member| {
                let is_muons = self.name == Muon && member.is_matrix;
                is_muons == (name == Muon) && member.decays == decays
            });
            let paths: Vec<&str> = members.map(|member| member.path.as_str()).collect();
            if !paths.is_empty() {
                let decay = if decays { decay } else { 0.0 };
                let members = ParamGroup::from_paths(paths);
                groups = self.with(Some(groups), members, (name, decay), seals);
            }
        }
        groups
    }

    /// Adds an optimizer for a group of parameters to `groups`, or creates the list.
    fn with(
        &self,
        groups: Option<OptimizerGroups>,
        members: ParamGroup,
        (name, weight_decay): (OptimizerName, f32),
        seals: bool,
    ) -> OptimizerGroups {
        let numbers = Numbers {
            weight_decay,
            ..self.numbers
        };
        let to = (groups, members, seals);
        match name {
            OptimizerName::Adamw => put(numbers.adamw(), to),
            OptimizerName::Adam => put(numbers.adam(), to),
            OptimizerName::Sgd => put(numbers.sgd(), to),
            OptimizerName::Rmsprop => put(numbers.rmsprop(), to),
            OptimizerName::Adagrad => put(numbers.adagrad(), to),
            OptimizerName::Adan => put(numbers.adan(), to),
            OptimizerName::Lion => put(numbers.lion(), to),
            OptimizerName::Muon => put(numbers.muon(), to),
        }
    }

    /// Returns the paths of the parameters that one rank must own, because they are stepped as whole matrices.
    pub(crate) fn owned(&self) -> Vec<&str> {
        let is_muon = self.name == OptimizerName::Muon;
        let owned = self
            .members
            .iter()
            .filter(|member| is_muon && member.is_matrix);
        owned.map(|member| member.path.as_str()).collect()
    }

    /// Returns the number of values that the optimizer keeps for each element of a parameter.
    pub(crate) fn values_of(&self, path: &str) -> usize {
        match self.name {
            OptimizerName::Muon => {
                if self.owned().contains(&path) {
                    1
                } else {
                    2
                }
            }
            OptimizerName::Adamw | OptimizerName::Adam => 2,
            OptimizerName::Sgd => usize::from(self.numbers.momentum > 0.0),
            OptimizerName::Rmsprop => 1 + usize::from(self.numbers.momentum > 0.0),
            OptimizerName::Adagrad | OptimizerName::Lion => 1,
            OptimizerName::Adan => 4,
        }
    }

    /// Returns the number of values that the optimizers keep for all parameters of the model.
    pub(crate) fn num_values(&self) -> usize {
        let members = self.members.iter();
        members
            .map(|member| member.elements * self.values_of(&member.path))
            .sum()
    }

    /// Returns the settings that are compared when a run resumes.
    pub(crate) fn settings(&self) -> Map<String, Value> {
        // The number as typed, not the nearest 32-bit number printed with 64 bits.
        let decimal = |value: f32| value.to_string().parse().unwrap_or(f64::from(value));
        let Numbers {
            beta1,
            beta2,
            eps,
            momentum,
            weight_decay,
        } = self.numbers;
        let mut all = Map::new();
        all.insert(OPTIMIZER.to_owned(), json!(self.name));
        all.insert(NO_DECAY.to_owned(), json!(self.no_decay));
        for (flag, value) in [
            ("--beta1", beta1),
            ("--beta2", beta2),
            ("--eps", eps),
            ("--momentum", momentum),
            ("--weight-decay", weight_decay),
        ] {
            if has(self.name, flag) {
                all.insert(flag.to_owned(), json!(decimal(value)));
            }
        }
        all
    }
}

/// Adds an optimizer for `members` to `groups`, or creates the list. Seals its state if `seals`.
fn put(
    optimizer: impl Optimizer,
    (groups, members, seals): (Option<OptimizerGroups>, ParamGroup, bool),
) -> OptimizerGroups {
    fn joined(
        groups: Option<OptimizerGroups>,
        members: ParamGroup,
        optimizer: impl Optimizer,
    ) -> OptimizerGroups {
        match groups {
            None => optimizer.into(),
            Some(groups) => groups.with_group(members, optimizer),
        }
    }
    if seals {
        joined(groups, members, SealedOptimizer::new(optimizer))
    } else {
        joined(groups, members, optimizer)
    }
}

/// Returns the parameters of a model, each with true if it is in a block.
fn table<A: Architecture>(sizes: A) -> Vec<(ParameterSpec, bool)> {
    let blocks = Pattern::new(A::BLOCKS);
    let table = sizes.parameters().into_iter();
    let table = table.map(|spec| {
        let is_in_block = blocks.is_around(&spec.path);
        (spec, is_in_block)
    });
    table.collect()
}

/// Returns the paths of the parameters that these patterns exempt from weight decay.
fn undecayed(
    patterns: &[String],
    table: &[(ParameterSpec, bool)],
) -> Result<Vec<String>, InputError> {
    let mut all = Vec::new();
    for text in patterns {
        let pattern = Pattern::new(text.as_str());
        let found = table.iter().filter(|(spec, _)| match text.as_str() {
            VECTORS => spec.shape.len() == 1,
            _ => pattern.prefix_of(&spec.path).is_some(),
        });
        let before = all.len();
        all.extend(found.map(|(spec, _)| spec.path.clone()));
        if all.len() == before {
            let known = table.iter().take(8).map(|(spec, _)| spec.path.as_str());
            return Err(InputError::UnknownName {
                what: "parameter or module of --no-decay",
                name: text.clone(),
                known: format!("{VECTORS}, {}", known.collect::<Vec<_>>().join(", ")),
            });
        }
    }
    Ok(all)
}

/// Checks the learning rate.
fn check_rate(rate: f64) -> Result<(), InputError> {
    if rate.is_finite() && rate >= 0.0 {
        Ok(())
    } else {
        Err(InputError::OutOfRange {
            flag: "--lr",
            value: rate,
            expected: "a number of at least 0",
        })
    }
}

/// Resolves and checks the hyperparameters. Rejects one that the optimizer does not have.
fn numbers(args: &OptimizerArgs) -> Result<Numbers, InputError> {
    let name = args.optimizer;
    let fraction = |value: f32| (0.0..1.0).contains(&value);
    let positive = |value: f32| value.is_finite() && value > 0.0;
    let not_negative = |value: f32| value.is_finite() && value >= 0.0;
    let below_one = "at least 0 and below 1";
    type Check<'a> = (
        &'static str,
        Option<f32>,
        &'a dyn Fn(f32) -> bool,
        &'static str,
    );
    let checks: [Check<'_>; 5] = [
        ("--beta1", args.beta1, &fraction, below_one),
        ("--beta2", args.beta2, &fraction, below_one),
        ("--eps", args.eps, &positive, "a number above 0"),
        ("--momentum", args.momentum, &fraction, below_one),
        (
            "--weight-decay",
            args.weight_decay,
            &not_negative,
            "a number of at least 0",
        ),
    ];
    for (flag, value, is_valid, expected) in checks {
        let Some(value) = value else {
            continue;
        };
        if !is_valid(value) {
            // The number as typed, not the nearest 32-bit number.
            let value = value.to_string().parse().unwrap_or(f64::from(value));
            return Err(InputError::OutOfRange {
                flag,
                value,
                expected,
            });
        }
        if !has(name, flag) {
            return Err(InputError::Excludes {
                first: flag,
                second: name.flag(),
                reason: "it has no such hyperparameter",
            });
        }
    }
    let usual = Numbers::of(name);
    Ok(Numbers {
        beta1: args.beta1.unwrap_or(usual.beta1),
        beta2: args.beta2.unwrap_or(usual.beta2),
        eps: args.eps.unwrap_or(usual.eps),
        momentum: args.momentum.unwrap_or(usual.momentum),
        weight_decay: args.weight_decay.unwrap_or(usual.weight_decay),
    })
}
