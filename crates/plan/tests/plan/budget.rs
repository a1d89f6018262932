//! Tests of schedules within a memory budget.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_plan::{BudgetError, Machine, MemoryPlan, TimePlan, fit};
use burn_fsdp_spmd::graph::Graph;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Error, LossScaling, Mode, Precision, Strategy, compile, lower};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// MLPs of different widths with residual connections.
#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
}

#[derive(Debug, Clone)]
struct Sizes {
    dim: usize,
    wide: Vec<usize>,
    rows: usize,
}

impl Sizes {
    fn random(random: &mut StdRng, most_blocks: usize) -> Self {
        let blocks = random.random_range(1..=most_blocks);
        Self {
            dim: random.random_range(3..20),
            wide: (0..blocks).map(|_| random.random_range(5..90)).collect(),
            rows: random.random_range(1..60),
        }
    }

    fn init(&self, device: &Device) -> Net {
        let block = |wide: &usize| Block {
            up: LinearConfig::new(self.dim, *wide).init(device),
            down: LinearConfig::new(*wide, self.dim).init(device),
        };
        Net {
            blocks: self.wide.iter().map(block).collect(),
            head: LinearConfig::new(self.dim, 7).init(device),
        }
    }

    fn batch(&self, step: usize) -> Tensor<2> {
        let values = (0..self.rows * self.dim).map(|i| ((i * 37 + step * 11) % 101) as f32 / 50.0);
        let values: Vec<f32> = values.collect();
        Tensor::<1>::from_floats(values.as_slice(), &Device::flex()).reshape([self.rows, self.dim])
    }

    fn graph(&self, options: &Options) -> Graph {
        let init = |device: &Device| self.init(device);
        let optimizer = AdamWConfig::new().build();
        let config = TraceConfig {
            precision: options.precision.clone(),
            ..TraceConfig::default()
        };
        trace(init, loss, &optimizer, &self.batch(0), config).unwrap()
    }
}

fn loss(net: &Net, x: Tensor<2>) -> Tensor<1> {
    let mut x = x.cast(net.head.weight.val().dtype());
    for block in &net.blocks {
        let wide = gelu(block.up.forward(x.clone()));
        x = x + block.down.forward(wide.clone() * wide);
    }
    net.head.forward(x).square().mean()
}

/// A test case: ranks, strategy and options.
#[derive(Debug, Clone)]
struct Case {
    sizes: Sizes,
    ranks: usize,
    strategy: Strategy,
    options: Options,
}

impl Case {
    fn random(random: &mut StdRng, most_blocks: usize) -> Self {
        let options = Options::default().kernels(random.random_bool(0.5));
        let options = if random.random_bool(0.3) {
            options.precision(Precision::new(FloatDType::BF16))
        } else {
            options
        };
        let place = if random.random_bool(0.5) {
            OptimizerPlace::InBackward
        } else {
            OptimizerPlace::AtEnd
        };
        let strategies = [
            Strategy::FullShard,
            Strategy::ShardGradOp,
            Strategy::NoShard,
        ];
        Self {
            sizes: Sizes::random(random, most_blocks),
            ranks: random.random_range(1..=4),
            strategy: strategies[random.random_range(0..3)],
            options: options.prefetch(random.random_bool(0.5)).optimizer(place),
        }
    }

    fn mode(&self, world: ProcessGroup) -> Mode {
        Mode::data_parallel(world, self.strategy).options(self.options.clone())
    }

    fn fake(&self) -> Mode {
        self.mode(ProcessGroup::fake(self.ranks, 0))
    }

    /// Returns the maximum number of bytes of any rank, and the seconds.
    fn cost(&self, graph: &Graph, options: &Options) -> (u64, f64) {
        let lowered = lower(graph.clone(), &self.fake().options(options.clone())).unwrap();
        let ranks = 0..self.ranks;
        let bytes = ranks.map(|rank| MemoryPlan::new(&lowered, rank).unwrap().process().bytes);
        let seconds = TimePlan::of_graph(&lowered, &Machine::cpu(), 0)
            .unwrap()
            .step;
        (bytes.max().unwrap(), seconds)
    }

    /// Returns the maximum number of tensor bytes that a rank has in a few steps.
    fn measured(&self, options: &Options) -> u64 {
        let case = self.clone();
        let options = options.clone();
        let body = move |world: ProcessGroup| -> Result<u64, Error> {
            let sizes = case.sizes.clone();
            let init = move |device: &Device| sizes.init(device);
            let mode = case.mode(world).options(options.clone());
            let mut step = compile(init, loss, AdamWConfig::new().build(), mode)?;
            for index in 0..3 {
                step.step(1e-2, &case.sizes.batch(index))?;
            }
            step.reset_peak();
            step.step(1e-2, &case.sizes.batch(3))?;
            Ok(step.memory().peak_bytes() as u64)
        };
        let ranks = launch(LaunchConfig::new(self.ranks), body).unwrap();
        ranks.into_iter().max().unwrap()
    }
}

#[test]
fn random_budgets_are_met_or_rejected_with_the_minimum() {
    let mut random = StdRng::seed_from_u64(5);
    let mut kept = 0;
    for number in 0..30 {
        let case = Case::random(&mut random, 9);
        let graph = case.sizes.graph(&case.options);
        let (most, _) = case.cost(&graph, &case.options);
        let budget = (most as f64 * random.random_range(0.4..1.05)) as u64;
        match fit(&graph, &case.fake(), &case.options, budget) {
            Ok(fitted) => {
                kept += usize::from(budget < most);
                let (bytes, seconds) = case.cost(&graph, &fitted.options);
                let what = format!("{number}, {case:?}: {fitted:?} of {budget}");
                assert!(bytes <= budget, "{what}: {bytes}");
                assert_eq!(
                    (bytes, seconds),
                    (fitted.peak_bytes, fitted.seconds),
                    "{what}"
                );
                let measured = case.measured(&fitted.options);
                assert!(measured <= budget, "{what}: {measured} measured");
                assert!(budget >= most || !fitted.units.is_empty(), "{what}");
                assert!(budget < most || fitted.units.is_empty(), "{what}");
            }
            Err(BudgetError::TooSmall {
                budget: told,
                least,
            }) => {
                assert!(told == budget && least > budget, "{number}, {case:?}");
                let fitted = fit(&graph, &case.fake(), &case.options, least).unwrap();
                assert!(fitted.peak_bytes <= least, "{number}, {case:?}");
            }
            Err(error) => panic!("{number}, {case:?}: {error}"),
        }
    }
    assert!(
        kept >= 5,
        "{kept} budgets had to be kept by computing again"
    );
}

#[test]
fn plans_of_small_graphs_are_the_fastest_that_fit() {
    let mut random = StdRng::seed_from_u64(11);
    for number in 0..12 {
        let case = Case::random(&mut random, 3);
        let graph = case.sizes.graph(&case.options);
        let mut names: Vec<String> = (0..case.sizes.wide.len())
            .map(|block| format!("blocks.{block}"))
            .collect();
        names.push("head".to_owned());
        let choices = (0..1_usize << names.len()).map(|mask| {
            let chosen = names
                .iter()
                .enumerate()
                .filter(|(index, _)| mask >> index & 1 == 1);
            let chosen = chosen.map(|(_, name)| name.as_str());
            case.cost(&graph, &case.options.clone().recompute_units(chosen))
        });
        let all: Vec<(u64, f64)> = choices.collect();
        for (budget, _) in &all {
            let fits = all.iter().filter(|(bytes, _)| bytes <= budget);
            // The first choice recomputes nothing. If it fits, no other one is tried.
            let fits = fits.take(if all[0].0 <= *budget { 1 } else { all.len() });
            let fastest = fits.map(|(_, seconds)| *seconds).fold(f64::MAX, f64::min);
            let fitted = fit(&graph, &case.fake(), &case.options, *budget).unwrap();
            assert!(fitted.peak_bytes <= *budget, "{number}, {case:?}");
            assert!(
                fitted.seconds <= fastest * (1.0 + 1e-9),
                "{number}, {case:?} within {budget}: {} and {fastest}, {:?}",
                fitted.seconds,
                fitted.units
            );
        }
        let least = all.iter().map(|(bytes, _)| *bytes).min().unwrap();
        let error = fit(&graph, &case.fake(), &case.options, least - 1).unwrap_err();
        assert!(error.to_string().contains(&least.to_string()), "{error}");
    }
}

#[test]
fn a_graph_with_other_compute_types_is_rejected() {
    let mut random = StdRng::seed_from_u64(3);
    let sizes = Sizes::random(&mut random, 2);
    let full = Options::default();
    let half = Options::default().precision(Precision::new(FloatDType::BF16));
    let mode = || Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard);
    let of_half = mode().options(half.clone());
    let error = fit(&sizes.graph(&full), &of_half, &half, u64::MAX).unwrap_err();
    assert!(
        error.to_string().contains("TraceConfig::precision"),
        "{error}"
    );
    assert!(fit(&sizes.graph(&half), &of_half, &half, u64::MAX).is_ok());
    // There are several graphs, and none of them has the memory of all.
    let scaled = half.clone().scale_loss(LossScaling::default());
    let of_scaled = mode().options(scaled.clone());
    let error = fit(&sizes.graph(&half), &of_scaled, &scaled, u64::MAX).unwrap_err();
    assert!(error.to_string().contains("scaled loss"), "{error}");
    // Casts by the model itself are its own choice.
    let of_full = mode().options(full.clone());
    assert!(fit(&sizes.graph(&half), &of_full, &full, u64::MAX).is_ok());
}
