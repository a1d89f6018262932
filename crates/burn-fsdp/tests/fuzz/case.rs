//! Trainings drawn at random: a model, an optimizer, and legs, each by one engine on a number of ranks, with a checkpoint
//! between them.

use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig,
    ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn_fsdp::Strategy as Sharding;
use burn_fsdp::compile::passes::schedule::OptimizerPlace;
use burn_fsdp::compile::{CompiledStep, Mode, compile};
use burn_fsdp::sharding::Cut;
use burn_fsdp::{Clip, Error};
use proptest::prelude::*;
use proptest::sample::select;

use super::model::{Batch, Net, Plan, plans};

/// A training.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) plan: Plan,
    pub(crate) optimizer: Optimizer,
    /// Batches of each rank in a step.
    pub(crate) micro_batches: usize,
    pub(crate) clip: Option<Limit>,
    pub(crate) legs: Vec<Leg>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) max_norm: f64,
    pub(crate) norm: Norm,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Norm {
    Two,
    One,
    Infinity,
}

/// Some steps of one engine.
#[derive(Debug, Clone)]
pub(crate) struct Leg {
    pub(crate) steps: usize,
    pub(crate) ranks: Ranks,
    pub(crate) engine: Engine,
    /// A layer that is frozen from here on if it was trained, and trained if it was frozen.
    pub(crate) switched: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Ranks {
    Line(usize),
    /// Two lines of so many, which hold the same.
    Copies(usize),
    /// So many parts of the batch, and of tensors along two axes.
    Grid(usize, usize, usize),
}

#[derive(Debug, Clone)]
pub(crate) enum Engine {
    Eager(Eager),
    Compiled(Compiled),
    Placed(Placed),
}

#[derive(Debug, Clone)]
pub(crate) struct Eager {
    pub(crate) strategy: Sharding,
    pub(crate) units: Vec<&'static str>,
    pub(crate) cut: Cut,
    pub(crate) whole_below: usize,
    pub(crate) prefetch: usize,
    pub(crate) reshards_root: bool,
    /// Each parameter is one rank's.
    pub(crate) has_owners: bool,
    pub(crate) accumulation: Accumulation,
    pub(crate) recomputes: bool,
    pub(crate) offloads: bool,
    /// Gathered weights are kept by pairs of ranks, where there are two pairs in a line.
    pub(crate) keeps_by_pairs: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Accumulation {
    /// One backward.
    Joined,
    /// A backward for each micro-batch, without synchronization but for the last.
    NoSync,
    /// A backward for each, and Burn's accumulator.
    Burn,
}

impl Accumulation {
    const ALL: [Self; 3] = [Self::Joined, Self::NoSync, Self::Burn];
}

#[derive(Debug, Clone)]
pub(crate) struct Compiled {
    pub(crate) strategy: Sharding,
    /// By paths, or by patterns.
    pub(crate) units: Option<Vec<&'static str>>,
    pub(crate) kernels: bool,
    pub(crate) fuse: bool,
    pub(crate) recomputes: bool,
    /// Of a unit for each layer.
    pub(crate) recomputes_layers: bool,
    pub(crate) reshards: bool,
    pub(crate) buckets: bool,
    pub(crate) prefetches: bool,
    pub(crate) place: OptimizerPlace,
}

/// A step by placements: its loss is that of the joined batch.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    /// Those that move the fewest bytes, in place of random ones.
    pub(crate) is_automatic: bool,
    /// Chooses the placements of parameters, if any is cut.
    pub(crate) salt: Option<u64>,
    pub(crate) fuse: bool,
    pub(crate) place: OptimizerPlace,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Optimizer {
    Sgd,
    Momentum,
    Adam,
    AdamW,
    AmsGrad,
    AdaGrad,
    RmsProp,
    Centered,
    Adan,
    /// AdamW, and SGD for the weights of layers.
    Groups,
    Lamb,
    Adafactor,
}

const OPTIMIZERS: [Optimizer; 12] = [
    Optimizer::Sgd,
    Optimizer::Momentum,
    Optimizer::Adam,
    Optimizer::AdamW,
    Optimizer::AmsGrad,
    Optimizer::AdaGrad,
    Optimizer::RmsProp,
    Optimizer::Centered,
    Optimizer::Adan,
    Optimizer::Groups,
    Optimizer::Lamb,
    Optimizer::Adafactor,
];

/// Where gradients come near the epsilon of an optimizer that divides by their size, it makes much of their last bits.
const EPSILON: f32 = 1e-2;

impl Optimizer {
    pub(crate) fn needs_whole_tensors(self) -> bool {
        matches!(self, Self::Lamb | Self::Adafactor)
    }

    fn momentum() -> SgdConfig {
        SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_nesterov(true)))
    }

    fn adamw() -> AdamWConfig {
        AdamWConfig::new()
            .with_epsilon(EPSILON)
            .with_weight_decay(0.1)
    }

    fn rms_prop() -> RmsPropConfig {
        RmsPropConfig::new().with_epsilon(EPSILON)
    }

    pub(crate) fn init(self) -> ModuleOptimizer {
        match self {
            Self::Sgd => SgdConfig::new().init(),
            Self::Momentum => Self::momentum().init(),
            Self::Adam => AdamConfig::new().with_epsilon(EPSILON).init(),
            Self::AdamW => Self::adamw().init(),
            Self::AmsGrad => Self::adamw().with_amsgrad(true).init(),
            Self::AdaGrad => AdaGradConfig::new().with_epsilon(EPSILON).init(),
            Self::RmsProp => Self::rms_prop().init(),
            Self::Centered => Self::rms_prop().with_centered(true).init(),
            Self::Adan => AdanConfig::new().with_epsilon(EPSILON).init(),
            Self::Groups => Self::adamw().init().with_group(
                ParamGroup::from_predicate("layers"),
                Self::momentum().build(),
                None,
            ),
            Self::Lamb => LambConfig::new().with_epsilon(EPSILON).init(),
            Self::Adafactor => AdafactorConfig::new().init(),
        }
    }

    /// Returns the step by this optimizer of `plan`.
    pub(crate) fn compile(self, plan: &Plan, mode: Mode) -> Result<CompiledStep<Batch>, Error> {
        macro_rules! compiled {
            ($config:expr) => {{
                let (built, run) = (plan.clone(), plan.clone());
                compile(
                    move |device| built.init(device),
                    move |net: &Net, batch: Batch| run.loss(net, batch),
                    $config.build(),
                    mode,
                )
            }};
        }
        let step = match self {
            Self::Sgd => compiled!(SgdConfig::new()),
            Self::Momentum => compiled!(Self::momentum()),
            Self::Adam => compiled!(AdamConfig::new().with_epsilon(EPSILON)),
            Self::AdamW | Self::Groups => compiled!(Self::adamw()),
            Self::AmsGrad => compiled!(Self::adamw().with_amsgrad(true)),
            Self::AdaGrad => compiled!(AdaGradConfig::new().with_epsilon(EPSILON)),
            Self::RmsProp => compiled!(Self::rms_prop()),
            Self::Centered => compiled!(Self::rms_prop().with_centered(true)),
            Self::Adan => compiled!(AdanConfig::new().with_epsilon(EPSILON)),
            Self::Lamb => compiled!(LambConfig::new().with_epsilon(EPSILON)),
            Self::Adafactor => compiled!(AdafactorConfig::new()),
        };
        Ok(step?)
    }
}

impl Limit {
    pub(crate) fn clip(self) -> Clip {
        Clip::to(self.max_norm).norm(match self.norm {
            Norm::Two => burn_fsdp::optim::Norm::P(2.0),
            Norm::One => burn_fsdp::optim::Norm::P(1.0),
            Norm::Infinity => burn_fsdp::optim::Norm::Infinity,
        })
    }
}

impl Ranks {
    pub(crate) fn number(self) -> usize {
        match self {
            Self::Line(ranks) => ranks,
            Self::Copies(ranks) => 2 * ranks,
            Self::Grid(data, model, depth) => data * model * depth,
        }
    }

    /// Returns how many parts the batch of a step has, and which is a rank's.
    pub(crate) fn part_of_batch(self, rank: usize) -> usize {
        match self {
            Self::Line(_) | Self::Copies(_) => rank,
            Self::Grid(_, model, depth) => rank / (model * depth),
        }
    }

    pub(crate) fn num_parts(self) -> usize {
        match self {
            Self::Grid(data, ..) => data,
            _ => self.number(),
        }
    }
}

/// The engines of which a case may have legs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Engines {
    Eager,
    Compiled,
    Placed,
    All,
}

pub(crate) fn cases(engines: Engines) -> impl Strategy<Value = Case> {
    let norms = select(&[Norm::Two, Norm::One, Norm::Infinity][..]);
    let limits = (select(&[0.01, 0.3, 1e3][..]), norms);
    let limits = limits.prop_map(|(max_norm, norm)| Limit { max_norm, norm });
    (
        plans(),
        select(&OPTIMIZERS[..]),
        1..4_usize,
        prop::option::weighted(0.3, limits),
        prop::collection::vec(legs(engines), 1..3),
    )
        .prop_map(move |(plan, optimizer, micro_batches, clip, legs)| Case {
            plan,
            // A compiled step has one optimizer.
            optimizer: match engines {
                Engines::Eager => optimizer,
                _ if optimizer == Optimizer::Groups => Optimizer::AdamW,
                _ => optimizer,
            },
            micro_batches,
            clip,
            legs,
        })
        .prop_map(Case::with_whole_tensors)
}

impl Case {
    /// Lets an optimizer that needs whole tensors have them.
    fn with_whole_tensors(mut self) -> Self {
        if self.optimizer.needs_whole_tensors() {
            for leg in &mut self.legs {
                match &mut leg.engine {
                    Engine::Eager(eager) => eager.has_owners = true,
                    Engine::Compiled(compiled) => compiled.strategy = Sharding::NoShard,
                    // Gradients that are added up over micro-batches are cut before the optimizer has them.
                    Engine::Placed(placed) if self.micro_batches > 1 => {
                        placed.is_automatic = false;
                        placed.salt = None;
                    }
                    Engine::Placed(_) => {}
                }
            }
        }
        for leg in &mut self.legs {
            let strategy = match &leg.engine {
                Engine::Eager(eager) => eager.strategy,
                Engine::Compiled(compiled) => compiled.strategy,
                Engine::Placed(_) => continue,
            };
            // Without shards there is nothing to copy.
            if let (Sharding::NoShard, Ranks::Copies(ranks)) = (strategy, leg.ranks) {
                leg.ranks = Ranks::Line(2 * ranks);
            }
        }
        self
    }
}

fn legs(engines: Engines) -> BoxedStrategy<Leg> {
    let ranks = [
        Ranks::Line(1),
        Ranks::Line(2),
        Ranks::Line(3),
        Ranks::Line(4),
        Ranks::Copies(1),
        Ranks::Copies(2),
    ];
    let on_ranks = |engine: BoxedStrategy<Engine>| (select(ranks.to_vec()), engine).boxed();
    let both = match engines {
        Engines::Eager => on_ranks(eager().boxed()),
        Engines::Compiled => on_ranks(compiled().boxed()),
        Engines::Placed => placed(),
        Engines::All => prop_oneof![
            on_ranks(eager().boxed()),
            on_ranks(compiled().boxed()),
            placed()
        ]
        .boxed(),
    };
    (1..3_usize, both, prop::option::weighted(0.2, 0..4_usize))
        .prop_map(|(steps, (ranks, engine), switched)| Leg {
            steps,
            ranks,
            engine,
            switched,
        })
        .boxed()
}

fn placed() -> BoxedStrategy<(Ranks, Engine)> {
    let grids = [
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 3, 1),
        (2, 2, 1),
        (3, 1, 1),
        (4, 1, 1),
        (1, 4, 1),
        (1, 2, 2),
        (2, 2, 2),
    ];
    let places = [OptimizerPlace::InBackward, OptimizerPlace::AtEnd];
    let chosen = (any::<[bool; 2]>(), 0..1000_u64, select(places.to_vec()));
    (select(grids.to_vec()), chosen)
        .prop_map(
            |((data, model, depth), ([is_automatic, fuse], salt, place))| {
                let placed = Placed {
                    is_automatic: is_automatic && model * depth == 1,
                    salt: Some(salt),
                    fuse,
                    place,
                };
                (Ranks::Grid(data, model, depth), Engine::Placed(placed))
            },
        )
        .boxed()
}

fn strategies() -> impl Strategy<Value = Sharding> {
    select(
        &[
            Sharding::FullShard,
            Sharding::ShardGradOp,
            Sharding::NoShard,
        ][..],
    )
}

fn eager() -> impl Strategy<Value = Engine> {
    let units = [
        vec![],
        vec!["layers.*"],
        vec!["layers.*", "layers.*.**"],
        vec!["layers"],
        vec!["layers.0", "head"],
    ];
    (
        strategies(),
        select(units.to_vec()),
        select(&[Cut::Elements, Cut::Dims][..]),
        select(&[0, 7, 40, 1000][..]),
        0..3_usize,
        any::<[bool; 5]>(),
        select(&Accumulation::ALL[..]),
    )
        .prop_map(
            |(strategy, units, cut, whole_below, prefetch, flags, accumulation)| {
                let [
                    reshards_root,
                    has_owners,
                    recomputes,
                    offloads,
                    keeps_by_pairs,
                ] = flags;
                Engine::Eager(Eager {
                    strategy,
                    units,
                    cut,
                    whole_below,
                    prefetch,
                    reshards_root,
                    has_owners,
                    accumulation,
                    recomputes,
                    offloads,
                    keeps_by_pairs,
                })
            },
        )
}

fn compiled() -> impl Strategy<Value = Engine> {
    let units = [
        None,
        Some(vec!["layers.*"]),
        Some(vec!["layers"]),
        Some(vec!["**"]),
    ];
    let places = [
        OptimizerPlace::InBackward,
        OptimizerPlace::AtEnd,
        OptimizerPlace::InNextForward,
    ];
    (
        strategies(),
        select(units.to_vec()),
        any::<[bool; 7]>(),
        select(places.to_vec()),
    )
        .prop_map(|(strategy, units, flags, place)| {
            let [
                kernels,
                fuse,
                recomputes,
                recomputes_layers,
                reshards,
                buckets,
                prefetches,
            ] = flags;
            let has_layers = units.as_deref() == Some(&["layers.*"]);
            let recomputes_layers = recomputes_layers && has_layers;
            Engine::Compiled(Compiled {
                strategy,
                units,
                kernels,
                fuse,
                recomputes,
                recomputes_layers,
                reshards,
                buckets,
                prefetches,
                place,
            })
        })
}
