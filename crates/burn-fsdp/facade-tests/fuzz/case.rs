//! Trainings drawn at random: a model, an optimizer, and legs. Each leg runs one engine on a number of ranks, with a
//! checkpoint between legs.

use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::ParamGroup;
use burn::optim::ModuleOptimizer;
use burn_fsdp::Clip;
use burn_fsdp::Strategy as Sharding;
use burn_fsdp::compile::LossScaling;
use burn_fsdp::optim::StateFormat;
use burn_fsdp::sharding::Cut;
use proptest::prelude::*;
use proptest::sample::select;

use super::batch::Place;
use super::legs::{Engine, Leg, Ranks, legs};
use super::model::{Plan, plans};
use super::optimizer::{OPTIMIZERS, Optimizer};
use super::plain::{GROWTH_INTERVAL, RATE};
use super::precision::Halves;

/// A training run.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) plan: Plan,
    pub(crate) optimizer: Optimizer,
    /// Batches of each rank in a step.
    pub(crate) micro_batches: usize,
    pub(crate) clip: Option<Limit>,
    pub(crate) legs: Vec<Leg>,
    /// True if checkpoints are kept in memory, and not in files.
    pub(crate) is_in_memory: bool,
    /// The initial scale of losses in `f16`, as a power of 2.
    pub(crate) scale: i32,
    /// The form of the optimizer's states, if they have fewer bits.
    pub(crate) states: Option<StateFormat>,
    pub(crate) rates: Rates,
}

/// The learning rates of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rates {
    /// One for all parameters.
    One,
    /// Different rates for the layers and the embedding. Where groups overlap, the last one counts.
    OfParts,
    /// A different rate for biases, in every layer and every group of the optimizer.
    OfBiases,
}

impl Rates {
    const ALL: [Self; 3] = [Self::One, Self::OfParts, Self::OfBiases];

    /// Returns the rates of a step, which fall from step to step.
    pub(crate) fn of(self, step: usize) -> ModuleLearningRate {
        let groups: &[(&str, f64)] = match self {
            Self::One => return RATE.into(),
            Self::OfParts => &[("layers", 0.3), ("embed", 2.0), ("layers.1", 1.5)],
            Self::OfBiases => &[("bias", 0.1)],
        };
        let now = RATE / (1.0 + 0.1 * step as f64);
        let rates = ModuleLrScheduler::new(now);
        let mut rates = groups.iter().fold(rates, |rates, (part, factor)| {
            rates.with_group(ParamGroup::from_predicate(*part), now * factor)
        });
        rates.step()
    }
}

/// Draws options that only some engines have. Placements draw nothing here, so their seeds still give the same cases.
fn extras(engines: Engines) -> BoxedStrategy<(Option<StateFormat>, Rates)> {
    let rates = || prop_oneof![2 => Just(Rates::One), 1 => select(&Rates::ALL[1..])];
    let formats = select(&[StateFormat::Bf16, StateFormat::Block8][..]);
    match engines {
        Engines::Placed => Just((None, Rates::One)).boxed(),
        Engines::Eager | Engines::Compiled => {
            (prop::option::weighted(0.3, formats), rates()).boxed()
        }
        // Placements refuse states in fewer bits.
        Engines::All => (Just(None), rates()).boxed(),
    }
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

impl Limit {
    pub(crate) fn clip(self) -> Clip {
        Clip::to(self.max_norm).norm(match self.norm {
            Norm::Two => burn_fsdp::optim::Norm::P(2.0),
            Norm::One => burn_fsdp::optim::Norm::P(1.0),
            Norm::Infinity => burn_fsdp::optim::Norm::Infinity,
        })
    }
}

/// The engines that a case may use in its legs.
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
        prop::collection::vec(legs(engines), 1..4),
        any::<bool>(),
        select(&[0, 8, 16, 24][..]),
        extras(engines),
    )
        .prop_map(
            move |(plan, optimizer, micro_batches, clip, legs, is_in_memory, scale, extras)| Case {
                plan,
                optimizer: match engines {
                    Engines::Eager => optimizer,
                    _ => optimizer.compiled(),
                },
                micro_batches,
                clip,
                legs,
                is_in_memory,
                scale,
                states: extras.0.filter(|_| optimizer.may_have_few_bits()),
                rates: extras.1,
            },
        )
        .prop_map(Case::with_whole_tensors)
        .prop_map(Case::without_unsupported_combinations)
}

impl Case {
    /// Returns the loss scaling, where losses are scaled.
    pub(crate) fn scaling(&self) -> LossScaling {
        LossScaling {
            initial_scale: 2_f64.powi(self.scale),
            growth_interval: GROWTH_INTERVAL,
            ..LossScaling::default()
        }
    }

    /// Returns the optimizer, without states.
    pub(crate) fn module_optimizer(&self, plan: &Plan) -> ModuleOptimizer {
        self.optimizer.init(plan, self.states)
    }

    /// Gives an optimizer that needs whole tensors such tensors.
    fn with_whole_tensors(mut self) -> Self {
        if self.optimizer.needs_whole_tensors() {
            for leg in &mut self.legs {
                match &mut leg.engine {
                    Engine::Eager(eager) => eager.has_owners = true,
                    Engine::Compiled(compiled) => compiled.has_owners = true,
                    // Gradients that are added up over micro-batches, or scaled, are cut before the optimizer has them.
                    Engine::Placed(placed)
                        if self.micro_batches > 1 || placed.halves.are_scaled() =>
                    {
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

    /// Leaves out combinations that are documented as unsupported.
    fn without_unsupported_combinations(mut self) -> Self {
        let may_have_states = self.plan.may_have_states();
        let has_adapters = self.plan.adapters.is_some();
        for leg in &mut self.legs {
            match &mut leg.engine {
                // Gradients of regions are added in the type in which they travel, so that fewer sums overflow.
                Engine::Eager(eager) if eager.recomputes && eager.halves.are_scaled() => {
                    self.scale = self.scale.min(8);
                }
                // Each micro-batch's gradients travel separately.
                Engine::Compiled(compiled)
                    if self.micro_batches > 1 && compiled.halves.are_scaled() =>
                {
                    self.scale = self.scale.min(8);
                }
                // Ranks round parts of sums.
                Engine::Placed(placed) if placed.halves.are_scaled() => {
                    self.scale = self.scale.min(8);
                }
                _ => {}
            }
            if let Engine::Eager(eager) = &mut leg.engine {
                // Shards that divide a block of states are refused.
                if self.states == Some(StateFormat::Block8) {
                    eager.cut = Cut::Multiples(StateFormat::BLOCK);
                }
                // The oracle rounds parameters, and not the factors of a product.
                eager.gathers_in_8_bits &= !has_adapters;
            }
            // A step whose loss is scaled keeps its nodes.
            match &mut leg.engine {
                Engine::Compiled(compiled) if compiled.halves.are_scaled() => compiled.moves = None,
                Engine::Placed(placed) if placed.halves.are_scaled() => placed.moves = None,
                _ => {}
            }
            if let (Engine::Compiled(compiled), false) = (&mut leg.engine, may_have_states) {
                compiled.halves = compiled.halves.with_states(false);
            }
            if has_adapters {
                match &mut leg.engine {
                    Engine::Eager(eager) => eager.halves = Halves::default(),
                    Engine::Compiled(compiled) => compiled.halves = Halves::default(),
                    Engine::Placed(placed) => placed.halves = Halves::default(),
                }
            }
        }
        self
    }

    /// The steps of each leg, with the leg.
    pub(crate) fn legs(&self) -> impl Iterator<Item = (std::ops::Range<usize>, &Leg)> {
        self.legs.iter().scan(0, |next, leg| {
            let steps = *next..*next + leg.steps;
            *next = steps.end;
            Some((steps, leg))
        })
    }

    /// Returns the place of a batch in a leg; evaluations have separate places.
    pub(crate) fn place(leg: &Leg, step: usize, part: usize, micro: usize) -> Place {
        Place {
            step,
            part,
            micro,
            is_uneven: leg.is_uneven(),
        }
    }

    /// Returns the place of the batch by which a leg is evaluated, on all ranks.
    pub(crate) fn place_of_evaluation(end: usize) -> Place {
        Place {
            step: 50 + end,
            part: 0,
            micro: 0,
            is_uneven: false,
        }
    }
}
