//! Legs of training runs: some steps of one engine on a number of ranks, and the end of the leg.

use burn::tensor::FloatDType;
use burn_fsdp::Strategy as Sharding;
use burn_fsdp::internals::compile::passes::schedule::OptimizerPlace;
use burn_fsdp::sharding::Cut;
use proptest::prelude::*;
use proptest::sample::select;

use super::case::Engines;
use super::precision::{Halves, halves};

/// Some steps of one engine.
#[derive(Debug, Clone)]
pub(crate) struct Leg {
    pub(crate) steps: usize,
    pub(crate) ranks: Ranks,
    pub(crate) engine: Engine,
    /// A layer that is frozen from now on if it was trained, and trained if it was frozen.
    pub(crate) switched: Option<usize>,
    pub(crate) end: End,
}

/// The events after the last step of a leg is saved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum End {
    Nothing,
    /// The step is saved in the background of another step, which is not saved and is lost.
    InBackground,
    /// A rank dies in the following step, or while saving it.
    Death(Death),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Death {
    /// The rank that dies.
    pub(crate) rank: usize,
    pub(crate) place: Place,
    /// True for a panic, false for an error.
    pub(crate) panics: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Place {
    /// Before one of the layers that the eager engine runs.
    Layer(usize),
    /// The first collective of a step.
    Collective,
    /// The first collective of the eager engine's backward.
    Backward,
    /// One of the file system calls that save a step.
    Storage(usize),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Ranks {
    Line(usize),
    /// Two lines of this many ranks, which hold the same values.
    Copies(usize),
    /// This many parts of the batch, and of tensors along two axes.
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
    /// True if each parameter belongs to one rank.
    pub(crate) has_owners: bool,
    pub(crate) accumulation: Accumulation,
    pub(crate) recomputes: bool,
    pub(crate) offloads: bool,
    /// True if pairs of ranks keep gathered weights, where a line has two pairs.
    pub(crate) keeps_by_pairs: bool,
    pub(crate) halves: Halves,
    /// True if the rows of ranks differ.
    pub(crate) is_uneven: bool,
    /// True if model and optimizer move to a new module in memory, by Burn's records, after the first step.
    pub(crate) moves: bool,
    /// True if vectors are also sharded.
    pub(crate) shards_vectors: bool,
    /// True if hooks gather and reduce instead of the engine.
    pub(crate) has_hook: bool,
    /// True if shards travel to gathers in 8 bits.
    pub(crate) gathers_in_8_bits: bool,
    /// True if the optimizer steps in backward, where nothing needs all gradients before.
    pub(crate) steps_in_backward: bool,
    /// The seed of lists of units that each unit gathers ahead.
    pub(crate) lists: Option<u64>,
    /// True if shards and gradients are in files.
    pub(crate) in_files: bool,
    /// True if only the regions of the first layer are recomputed.
    pub(crate) selects_regions: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Accumulation {
    /// One backward.
    Joined,
    /// A backward for each micro-batch, with synchronization only in the last.
    NoSync,
    /// A backward for each micro-batch, with Burn's accumulator.
    Burn,
}

impl Accumulation {
    const ALL: [Self; 3] = [Self::Joined, Self::NoSync, Self::Burn];
}

#[derive(Debug, Clone)]
pub(crate) struct Compiled {
    pub(crate) strategy: Sharding,
    /// True if each parameter belongs to one rank.
    pub(crate) has_owners: bool,
    /// By paths, or by patterns.
    pub(crate) units: Option<Vec<&'static str>>,
    pub(crate) kernels: bool,
    pub(crate) fuse: bool,
    pub(crate) recomputes: bool,
    /// In how many parts the loss is computed, if it can be.
    pub(crate) loss_chunks: usize,
    /// True for regions with a unit for each layer.
    pub(crate) recomputes_layers: bool,
    /// True for regions that the loss names.
    pub(crate) recomputes_regions: bool,
    pub(crate) reshards: bool,
    pub(crate) buckets: bool,
    pub(crate) prefetches: bool,
    pub(crate) place: OptimizerPlace,
    pub(crate) halves: Halves,
    /// Chooses the operations that run in the next step, if any.
    pub(crate) moves: Option<u64>,
}

/// A step by placements: its loss is the joined batch's.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    /// True for the placements that move the fewest bytes, in place of random ones.
    pub(crate) is_automatic: bool,
    /// Chooses the placements of parameters, if any is cut.
    pub(crate) salt: Option<u64>,
    pub(crate) fuse: bool,
    pub(crate) place: OptimizerPlace,
    pub(crate) halves: Halves,
    /// Chooses the operations that run in the next step, if any.
    pub(crate) moves: Option<u64>,
}

impl Ranks {
    pub(crate) fn number(self) -> usize {
        match self {
            Self::Line(ranks) => ranks,
            Self::Copies(ranks) => 2 * ranks,
            Self::Grid(data, model, depth) => data * model * depth,
        }
    }

    /// Returns the number of parts of a step's batch, and the rank's part.
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

impl Leg {
    /// Returns the types in which it computes.
    pub(crate) fn halves(&self) -> Halves {
        match &self.engine {
            Engine::Eager(eager) => eager.halves,
            Engine::Compiled(compiled) => compiled.halves,
            Engine::Placed(placed) => placed.halves,
        }
    }

    pub(crate) fn is_uneven(&self) -> bool {
        matches!(&self.engine, Engine::Eager(eager) if eager.is_uneven)
    }
}

pub(crate) fn legs(engines: Engines) -> BoxedStrategy<Leg> {
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
    let switched = prop::option::weighted(0.2, 0..4_usize);
    (1..3_usize, both, switched, ends())
        .prop_map(|(steps, (ranks, engine), switched, end)| Leg {
            steps,
            ranks,
            engine,
            switched,
            end,
        })
        .boxed()
}

fn ends() -> impl Strategy<Value = End> {
    let places = prop_oneof![
        (0..5_usize).prop_map(Place::Layer),
        Just(Place::Collective),
        Just(Place::Backward),
        (0..24_usize).prop_map(Place::Storage),
    ];
    let deaths = (0..8_usize, places, any::<bool>());
    let deaths = deaths.prop_map(|(rank, place, panics)| {
        End::Death(Death {
            rank,
            place,
            panics,
        })
    });
    prop_oneof![6 => Just(End::Nothing), 2 => Just(End::InBackground), 2 => deaths]
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
    let halves = halves(&[FloatDType::BF16, FloatDType::F16]);
    (select(grids.to_vec()), chosen, halves, moves())
        .prop_map(
            |((data, model, depth), ([is_automatic, fuse], salt, place), halves, moves)| {
                let placed = Placed {
                    is_automatic: is_automatic && model * depth == 1,
                    salt: Some(salt),
                    fuse,
                    place,
                    halves,
                    moves,
                };
                (Ranks::Grid(data, model, depth), Engine::Placed(placed))
            },
        )
        .boxed()
}

fn moves() -> impl Strategy<Value = Option<u64>> {
    prop::option::weighted(0.3, 0..1000_u64)
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
        vec!["embed", "layers.*", "table"],
    ];
    (
        strategies(),
        select(units.to_vec()),
        select(&[Cut::Elements, Cut::Dims, Cut::Multiples(16)][..]),
        select(&[0, 7, 40, 1000][..]),
        0..3_usize,
        any::<[bool; 12]>(),
        (prop::bool::weighted(0.2), prop::option::of(0..1000_u64)),
        select(&Accumulation::ALL[..]),
        halves(&[FloatDType::BF16, FloatDType::F16]),
    )
        .prop_map(
            |(strategy, units, cut, whole_below, prefetch, flags, rare, accumulation, halves)| {
                let (packs, lists) = rare;
                let [
                    reshards_root,
                    has_owners,
                    recomputes,
                    offloads,
                    keeps_by_pairs,
                    is_uneven,
                    moves,
                    shards_vectors,
                    has_hook,
                    steps_in_backward,
                    in_files,
                    selects_regions,
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
                    halves,
                    is_uneven,
                    moves,
                    shards_vectors,
                    has_hook,
                    gathers_in_8_bits: packs,
                    steps_in_backward,
                    lists,
                    in_files,
                    selects_regions,
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
        any::<[bool; 10]>(),
        1..4_usize,
        select(places.to_vec()),
        halves(&[FloatDType::BF16, FloatDType::F16]),
        moves(),
    )
        .prop_map(
            |(strategy, units, flags, loss_chunks, place, halves, moves)| {
                let [
                    kernels,
                    fuse,
                    recomputes,
                    recomputes_layers,
                    recomputes_regions,
                    has_states,
                    reshards,
                    buckets,
                    prefetches,
                    has_owners,
                ] = flags;
                let has_layers = units.as_deref() == Some(&["layers.*"]);
                let recomputes_layers = recomputes_layers && has_layers;
                Engine::Compiled(Compiled {
                    strategy,
                    has_owners,
                    units,
                    kernels,
                    fuse,
                    recomputes,
                    loss_chunks,
                    recomputes_layers,
                    recomputes_regions,
                    reshards,
                    buckets,
                    prefetches,
                    place,
                    halves: halves.with_states(has_states),
                    moves,
                })
            },
        )
}
