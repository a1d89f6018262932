//! Tests of plans against an allocator that counts every byte of a rank.
//!
//! The allocator's peak over a step, per byte of the planned peak of tensors, is the factor of
//! [`ProcessBytes`]. With `--nocapture`, each test prints the factors that it measures.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{Gpt, GptConfig, Llama};
use burn_fsdp_plan::{Machine, MemoryPlan, Plan, ProcessBytes, fit};
use burn_fsdp_spmd::passes::schedule::{Options, pipeline};
use burn_fsdp_spmd::trace::specs_of;
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Batch, Error, Mode, Precision, Strategy, compile};

use crate::counting::{Counting, count_for};
use crate::models::{Cnn, GPT, LLAMA, Recurrent, Tokens, WideHead, images, sequences, tokens};

mod counting;
mod models;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// Allows only one measurement at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Number of measured steps. The median counts, because a rank occasionally takes another buffer for the next message
/// while the last one is still with a slow peer.
const STEPS: usize = 5;

/// The bytes of one step on one rank.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// The planned peak of live tensors.
    tensors: u64,
    /// The maximum that the allocator counted.
    counted: u64,
}

impl Measured {
    fn factor(self) -> f64 {
        self.counted as f64 / self.tensors as f64
    }
}

/// A way to run a model.
#[derive(Debug, Clone)]
struct Case {
    num_ranks: usize,
    strategy: Strategy,
    options: Options,
}

impl Case {
    fn full_shard(num_ranks: usize) -> Self {
        Self {
            num_ranks,
            strategy: Strategy::FullShard,
            options: Options::default(),
        }
    }

    fn in_bf16(self) -> Self {
        Self {
            options: self.options.precision(Precision::new(FloatDType::BF16)),
            ..self
        }
    }

    /// Measures one step on each rank.
    fn measure<M: Module + 'static, B: Batch>(
        &self,
        init: impl Fn(&Device) -> M + Copy + Send + Sync + 'static,
        loss: fn(&M, B) -> Tensor<1>,
        batch: fn(&Device) -> B,
    ) -> Vec<Measured> {
        let case = self.clone();
        let body = move |world: ProcessGroup| -> Result<_, Error> {
            count_for(world.rank());
            let device = Device::flex();
            let mode =
                Mode::data_parallel(world.clone(), case.strategy).options(case.options.clone());
            let mut step = compile(init, loss, AdamWConfig::new().build(), mode)?;
            let batch = batch(&device);
            for _ in 0..4 {
                step.step(1e-3, &batch)?;
            }
            let graph = step.compile_for(1e-3, &batch)?;
            let tensors = MemoryPlan::new(&graph, world.rank())?.peak_bytes();
            drop(graph);
            // A step reads the batch in the memory of the caller.
            let specs = specs_of(&batch)?.into_iter();
            let sizes = specs.map(|spec| spec.shape.iter().product::<usize>() * spec.dtype.size());
            let lent: usize = sizes.sum();
            let mut counted = [0; STEPS];
            for counted in &mut counted {
                // Between two steps, every buffer is with its owner. The bytes that are neither in tensors nor in the
                // transport are the program and the graph.
                world.barrier("before").expect("the ranks are there");
                let pool = world.pool();
                let known = step.memory().live_bytes() + pool.live_bytes() + pool.kept_bytes();
                let other = ALLOCATOR.live() - known - lent;
                world.barrier("known").expect("the ranks are there");
                ALLOCATOR.reset_peak();
                step.step(1e-3, &batch)?;
                *counted = (ALLOCATOR.peak() - other) as u64;
            }
            counted.sort_unstable();
            let counted = counted[STEPS / 2];
            Ok(Measured { tensors, counted })
        };
        let config = LaunchConfig::new(self.num_ranks).threads_per_rank(1);
        launch(config, body).unwrap()
    }

    /// Checks that each rank's factor is at least `least` and at most `most`.
    fn check<M: Module + 'static, B: Batch>(
        &self,
        name: &str,
        [least, most]: [f64; 2],
        init: impl Fn(&Device) -> M + Copy + Send + Sync + 'static,
        loss: fn(&M, B) -> Tensor<1>,
        batch: fn(&Device) -> B,
    ) {
        let ranks = self.num_ranks;
        for (rank, measured) in self.measure(init, loss, batch).into_iter().enumerate() {
            let (Measured { tensors, counted }, factor) = (measured, measured.factor());
            println!(
                "{name}, rank {rank} of {ranks}: {tensors} bytes of tensors, {counted} counted: {factor:.4}"
            );
            assert!(
                (least..=most).contains(&factor),
                "{name}, rank {rank} of {ranks}: {factor} is not from {least} to {most}"
            );
        }
    }
}

fn gpt_loss(model: &Gpt, (tokens, targets): Tokens) -> Tensor<1> {
    model.loss(tokens, targets)
}

fn fused_gpt_loss(model: &Gpt, batch: Tokens) -> Tensor<1> {
    recorded(|| gpt_loss(model, batch))
}

fn llama_loss(model: &Llama, (tokens, targets): Tokens) -> Tensor<1> {
    recorded(|| model.loss(tokens, targets))
}

fn gpt_batch(device: &Device) -> Tokens {
    tokens(8, GPT.seq, device)
}

fn gpt(dim: usize) -> impl Fn(&Device) -> Gpt + Copy {
    move |device| {
        GptConfig { dim, ..GPT }
            .init(device, 1)
            .expect("the sizes are valid")
    }
}

fn llama(device: &Device) -> Llama {
    LLAMA.init(device, 1).expect("the sizes are valid")
}

/// The factors of steps that take at most the estimate.
const ESTIMATED: [f64; 2] = [ProcessBytes::RANGE[0], ProcessBytes::FACTOR];

#[test]
fn a_decoders_process_takes_at_most_the_estimate() {
    let _alone = alone();
    for num_ranks in [1, 2, 4] {
        let case = Case::full_shard(num_ranks);
        case.check("GPT", ESTIMATED, gpt(256), gpt_loss, gpt_batch);
        case.check("fused GPT", ESTIMATED, gpt(256), fused_gpt_loss, gpt_batch);
        case.check("fused Llama", ESTIMATED, llama, llama_loss, gpt_batch);
        let name = "fused GPT in bf16";
        let case = case.in_bf16();
        case.check(name, ESTIMATED, gpt(256), fused_gpt_loss, gpt_batch);
    }
}

#[test]
fn decoders_of_other_sizes_take_at_most_the_estimate() {
    let _alone = alone();
    for dim in [64, 128, 512] {
        let name = format!("fused GPT of width {dim}");
        let case = Case::full_shard(2);
        case.check(&name, ESTIMATED, gpt(dim), fused_gpt_loss, gpt_batch);
        let name = format!("{name} in bf16");
        let case = case.in_bf16();
        case.check(&name, ESTIMATED, gpt(dim), fused_gpt_loss, gpt_batch);
    }
}

fn wide_head(case: &Case, name: &str) {
    let name = format!("CNN with a wide head{name}");
    let range = ProcessBytes::RANGE;
    case.check(&name, range, WideHead::new, WideHead::loss, images);
}

fn lstm(case: &Case, name: &str) {
    let (name, range) = (format!("LSTM{name}"), ProcessBytes::RANGE);
    case.check(&name, range, Recurrent::new, Recurrent::loss, sequences);
}

#[test]
fn the_process_of_other_models_is_within_the_range() {
    let _alone = alone();
    for num_ranks in [1, 2, 4] {
        let case = Case::full_shard(num_ranks);
        case.check("CNN", ProcessBytes::RANGE, Cnn::new, Cnn::loss, images);
        wide_head(&case, "");
        lstm(&case, "");
    }
}

#[test]
fn the_process_of_other_schedules_and_strategies_is_within_the_range() {
    let _alone = alone();
    let prefetching = Options::default().prefetch(true);
    for (name, strategy, options) in [
        (", prefetching", Strategy::FullShard, prefetching),
        (", plain", Strategy::FullShard, Options::none()),
        (", replicated", Strategy::NoShard, Options::default()),
    ] {
        for num_ranks in [1, 2, 4] {
            let options = options.clone();
            let case = Case {
                num_ranks,
                strategy,
                options,
            };
            wide_head(&case, name);
            lstm(&case, name);
        }
    }
}

/// A budget counts the estimate of the process, so the process of a decoder keeps it.
#[test]
fn a_decoders_process_keeps_a_budget() {
    let _alone = alone();
    let config = TraceConfig::default();
    let batch = gpt_batch(&Device::flex());
    let optimizer = AdamWConfig::new().build();
    let graph = trace(gpt(256), fused_gpt_loss, &optimizer, &batch, config).unwrap();
    let mode = || Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard);
    let most = fit(&graph, &mode(), &Options::default(), u64::MAX).unwrap();
    let budget = most.peak_bytes * 9 / 10;
    let fitted = fit(&graph, &mode(), &Options::default(), budget).unwrap();
    let (units, planned) = (fitted.units, fitted.peak_bytes);
    assert!(!units.is_empty() && planned <= budget, "{planned}");
    let case = Case {
        options: fitted.options,
        ..Case::full_shard(2)
    };
    for measured in case.measure(gpt(256), fused_gpt_loss, gpt_batch) {
        assert!(measured.counted <= budget, "{measured:?} of {budget}");
    }
}

#[test]
fn thirteen_billion_parameters_are_traced_and_planned_in_little_memory() {
    let _alone = alone();
    let config = GptConfig::gpt_13b();
    counting::give_back_what_is_free();
    std::fs::write("/proc/self/clear_refs", "5").expect("a new measurement");
    let resident = peak_resident();
    let start = Instant::now();
    let graph = trace(
        move |device| config.init(device, 1).expect("the sizes are valid"),
        |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
        &AdamWConfig::new().build(),
        &tokens(1, config.seq, &Device::flex()),
        TraceConfig::default(),
    )
    .unwrap();
    let traced = start.elapsed();
    let passes = pipeline(8, Strategy::FullShard, &Options::default(), &[]);
    let graph = passes.run(graph).unwrap();
    let scheduled = start.elapsed();
    let plan = Plan::new(&graph, &Machine::a100_80g(), 0).unwrap();
    let planned = start.elapsed();
    // Resident memory: the zeros that represent the optimizer states are allocated but never touched. The system
    // counts pages per processor and sums them up only occasionally, so both peaks are approximate.
    let bytes = peak_resident().saturating_sub(resident);
    println!(
        "{} nodes traced after {traced:?}, scheduled after {scheduled:?}, planned after {planned:?}, \
         {} MB",
        plan.num_nodes,
        bytes / 1_000_000
    );
    assert!(bytes < 300_000_000, "{bytes} bytes");
    // The states are exact: three tensors of four bytes for each parameter, an eighth of them on this rank.
    let states = 12 * config.num_params() as u64 / 8;
    let at_rest = plan.memory.at_rest.total() - plan.memory.at_rest.buffers;
    assert!(at_rest.abs_diff(states) < 1_000_000, "{at_rest} {states}");
}

/// Returns the maximum resident memory of this process so far, in bytes.
fn peak_resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let mut words = line.expect("a peak").split_whitespace();
    let kilobytes = words.find_map(|word| word.parse::<usize>().ok());
    kilobytes.expect("a number") * 1024
}
