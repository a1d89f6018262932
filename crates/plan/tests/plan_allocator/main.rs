//! Tests of plans against an allocator that counts every byte of a rank.
//!
//! The allocator's peak over a step is compared with the plan's peak: live tensors, the bytes that operations
//! allocate in addition, and the transport's bytes. On one rank, its peak during every operation is also compared
//! with the plan for that operation.
//!
//! Every rank has one thread, as the plan assumes.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_models::fused::recorded;
use burn_fsdp_models::{Gpt, GptConfig};
use burn_fsdp_plan::{Machine, MemoryPlan, Plan};
use burn_fsdp_spmd::passes::schedule::{Options, pipeline};
use burn_fsdp_spmd::passes::{
    CommonSubexpressions, DeadCode, FusePointwise, GraphTransform, Liveness, Pipeline, Recompute,
    SelectKernels, StandIns, UseKernels,
};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Batch, Error, Mode, Strategy, compile};

use crate::counting::{Counting, count_for};
use crate::models::{Cnn, GPT, Recurrent, Tokens, WideHead, images, sequences, tokens};

mod counting;
mod models;
mod replay;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// Allows only one measurement at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Maximum number of bytes of a step outside tensors: the optimizer's operations, which are traced on the host, and
/// messages between ranks. They do not depend on the sizes.
const HOST_BYTES: usize = 96 << 10;

/// Number of measured steps. The median counts, because a rank occasionally takes another buffer for the next message
/// while the last one is still with a slow peer.
const STEPS: usize = 5;

/// The bytes of one step on one rank.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// The planned peak of live tensors.
    tensors: usize,
    /// The planned peak with scratch and transport.
    planned: usize,
    /// The maximum that the allocator counted.
    counted: usize,
}

/// Runs one step on each rank.
fn measure<M: Module + 'static, B: Batch>(
    num_ranks: usize,
    style: Strategy,
    options: &Options,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(&Device) -> B,
) -> Vec<Measured> {
    let options = options.clone();
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        count_for(world.rank());
        let device = Device::flex();
        let mode = Mode::data_parallel(world.clone(), style).options(options.clone());
        let step = compile(init, loss, AdamWConfig::new().build(), mode)?;
        let mut step = step;
        let batch = batch(&device);
        for _ in 0..4 {
            step.step(1e-3, &batch)?;
        }
        let graph = step.compile_for(1e-3, &batch)?;
        let plan = MemoryPlan::new(&graph, world.rank())?;
        drop(graph);
        let mut counted = [0; STEPS];
        for counted in &mut counted {
            // Between two steps, every buffer is with its owner. The bytes that are neither in tensors nor in the
            // transport are the program, the graph and the batch.
            world.barrier("before").expect("the ranks are there");
            let pool = world.pool();
            let known = step.memory().live_bytes() + pool.live_bytes() + pool.kept_bytes();
            let other = ALLOCATOR.live() - known;
            world.barrier("known").expect("the ranks are there");
            ALLOCATOR.reset_peak();
            step.step(1e-3, &batch)?;
            *counted = ALLOCATOR.peak() - other;
        }
        counted.sort_unstable();
        Ok(Measured {
            tensors: plan.peak_bytes() as usize,
            planned: plan.allocated as usize,
            counted: counted[STEPS / 2],
        })
    };
    let config = LaunchConfig::new(num_ranks).threads_per_rank(1);
    launch(config, body).unwrap()
}

fn percent(counted: usize, planned: usize) -> f64 {
    100.0 * (counted as f64 / planned as f64 - 1.0)
}

/// Checks a model with full sharding and the default options.
fn check<M: Module + 'static, B: Batch>(
    name: &str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(&Device) -> B,
) {
    let (style, options) = (Strategy::FullShard, Options::default());
    check_as(name, style, &options, init, loss, batch);
}

fn check_as<M: Module + 'static, B: Batch>(
    name: &str,
    style: Strategy,
    options: &Options,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(&Device) -> B,
) {
    let _alone = alone();
    for num_ranks in [1, 2, 4] {
        for (rank, measured) in measure(num_ranks, style, options, init, loss, batch)
            .iter()
            .enumerate()
        {
            let Measured {
                tensors,
                planned,
                counted,
            } = *measured;
            let (beside, of_tensors) = (percent(counted, planned), percent(counted, tensors));
            println!(
                "{name}, rank {rank} of {num_ranks}: {tensors} bytes of tensors, {planned} planned, {counted} \
                 counted: {beside:+.2} %, {of_tensors:+.2} % of tensors alone"
            );
            let allowed = if has_known_tiles() { 0.5 } else { 5.0 };
            let host = percent(counted.saturating_sub(HOST_BYTES), planned);
            assert!(
                host <= allowed && beside >= -allowed,
                "{name}, rank {rank} of {num_ranks}: {measured:?}"
            );
        }
    }
}

#[test]
fn the_process_memory_of_a_gpt_matches_the_plan() {
    check(
        "GPT",
        |device| GPT.init(device, 1).expect("the sizes are valid"),
        |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
        |device| tokens(8, GPT.seq, device),
    );
}

#[test]
fn the_process_memory_of_a_gpt_of_fused_operations_matches_the_plan() {
    check(
        "GPT of fused operations",
        |device| GPT.init(device, 1).expect("the sizes are valid"),
        |model: &Gpt, (tokens, targets): Tokens| recorded(|| model.loss(tokens, targets)),
        |device| tokens(8, GPT.seq, device),
    );
}

#[test]
fn the_process_memory_of_a_cnn_matches_the_plan() {
    check("CNN", Cnn::new, Cnn::loss, images);
}

#[test]
fn the_process_memory_of_a_cnn_with_a_wide_head_matches_the_plan() {
    check(
        "CNN with a wide head",
        WideHead::new,
        WideHead::loss,
        images,
    );
}

#[test]
fn the_process_memory_of_an_lstm_matches_the_plan() {
    check("LSTM", Recurrent::new, Recurrent::loss, sequences);
}

#[test]
fn the_process_memory_of_other_schedules_and_styles_matches_the_plan() {
    let mut prefetching = Options::default();
    prefetching.prefetch = Some(true);
    for (name, style, options) in [
        ("prefetching", Strategy::FullShard, prefetching),
        ("plain", Strategy::FullShard, Options::none()),
        ("replicated", Strategy::NoShard, Options::default()),
    ] {
        let name = |model: &str| format!("{model}, {name}");
        check_as(
            &name("CNN with a wide head"),
            style,
            &options,
            WideHead::new,
            WideHead::loss,
            images,
        );
        check_as(
            &name("LSTM"),
            style,
            &options,
            Recurrent::new,
            Recurrent::loss,
            sequences,
        );
    }
}

/// Bytes that an operation's bookkeeping may take, and shapes and handles between operations.
const SMALL: i64 = 4096;

/// Returns true if this processor's matrix products copy operands in the tiles that the plan assumes.
fn has_known_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// The implementation of a graph's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    /// Only Burn.
    Burn,
    /// The crate `kernels`, for the operations that it has.
    Kernels,
}

/// Checks every operation separately on one rank, with Burn and with kernels.
fn check_each<M: Module + 'static, B: Batch>(
    name: &'static str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(&Device) -> B,
) {
    for engine in [Engine::Burn, Engine::Kernels] {
        check_each_by(engine, name, init, loss, batch);
    }
}

fn check_each_by<M: Module + 'static, B: Batch>(
    engine: Engine,
    name: &'static str,
    init: fn(&Device) -> M,
    loss: fn(&M, B) -> Tensor<1>,
    batch: fn(&Device) -> B,
) {
    let _alone = alone();
    let body = move |_: ProcessGroup| -> Result<_, Error> {
        count_for(0);
        let optimizer = AdamWConfig::new().build();
        let batch = batch(&Device::flex());
        let graph = trace(init, loss, &optimizer, &batch, TraceConfig::default())?;
        let mut passes = Pipeline::new()
            .then(DeadCode)
            .then(CommonSubexpressions)
            .then(StandIns);
        if engine == Engine::Kernels {
            passes = passes.then(UseKernels);
        }
        let mut graph = passes.then(Recompute::default()).run(graph)?;
        if engine == Engine::Kernels {
            // These passes come after the collectives. There are none here.
            graph = SelectKernels.transform(FusePointwise.transform(graph)?)?;
        }
        let graph = Liveness.transform(graph)?;
        let plan = MemoryPlan::new(&graph, 0)?;
        let measured = replay::run(&graph, 3);
        assert_eq!(plan.moments.len(), measured.len());
        let at_rest = plan.at_rest.total() as i64;
        // Bytes left by bookkeeping grow from operation to operation, and do not belong to this one.
        let mut left = 0;
        for (moment, (index, peak, after)) in plan.moments.iter().zip(measured) {
            assert_eq!(moment.node, index);
            let tensors = moment.during.total() as i64 - at_rest;
            let scratch = peak as i64 - tensors - left;
            left = after as i64 - (moment.after as i64 - at_rest);
            let planned = moment.scratch as i64;
            let node = &graph.nodes()[index];
            let name_of_node = node.name();
            if !has_known_tiles()
                && ["Matmul", "matmul", "attention", "Conv"]
                    .iter()
                    .any(|it| name_of_node.contains(it))
            {
                continue;
            }
            let shapes: Vec<_> = node
                .operation
                .inputs()
                .map(|input| input.shape.to_vec())
                .collect();
            // For chains and norms, the plan has the maximum that their parts take at once.
            let is_most = ["pointwise", "norm"]
                .iter()
                .any(|it| name_of_node.contains(it));
            let unused = match is_most {
                true => planned,
                false => SMALL + planned / 50,
            };
            assert!(
                scratch <= planned + SMALL + planned / 50 && scratch >= planned - unused,
                "{name} by {engine:?}: node {index}, {name_of_node} of {shapes:?}, took {scratch} bytes beside its tensors, and \
                 {planned} were planned"
            );
        }
        Ok(())
    };
    launch(LaunchConfig::new(1).threads_per_rank(1), body).unwrap();
}

#[test]
fn the_memory_of_each_gpt_operation_matches_the_plan() {
    check_each(
        "GPT",
        |device| GPT.init(device, 1).expect("the sizes are valid"),
        |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
        |device| tokens(8, GPT.seq, device),
    );
}

#[test]
fn the_memory_of_each_cnn_operation_matches_the_plan() {
    check_each("CNN", Cnn::new, Cnn::loss, images);
    check_each(
        "CNN with a wide head",
        WideHead::new,
        WideHead::loss,
        images,
    );
}

#[test]
fn the_memory_of_each_lstm_operation_matches_the_plan() {
    check_each("LSTM", Recurrent::new, Recurrent::loss, sequences);
}

#[test]
fn memory_besides_tensors_is_listed_by_kernel() {
    let _alone = alone();
    let optimizer = AdamWConfig::new().build();
    let batch = images(&Device::flex());
    let config = TraceConfig::default();
    let graph = trace(WideHead::new, WideHead::loss, &optimizer, &batch, config).unwrap();
    let passes = pipeline(2, Strategy::FullShard, &Options::default(), &[]);
    let graph = passes.run(graph).unwrap();
    let plan = Plan::new(&graph, &Machine::cpu(), 0).unwrap();
    let largest = &plan.kernels[0];
    assert_eq!(largest.name, "Module.Conv2dWeightBackward");
    assert_eq!(largest.times, 2);
    // The gradient of the second convolution's weights: operands with channels and batch swapped, once more the input
    // with channels last and the gradient as weights, and rows of windows.
    let (x, grad) = (16 * 32 * 30 * 30, 16 * 64 * 14 * 14);
    let window = 16 * 14 * 14;
    let (rows, product, packed) = (window * 16, 64 * 16, 64 * 512);
    let scratch = 4 * (2 * x + 2 * grad + rows + product + packed);
    assert_eq!(largest.scratch, scratch);
    assert_eq!(largest.allocated, plan.memory.allocated);
    let at_most = plan.memory.peak_bytes() + plan.memory.transport + largest.scratch;
    assert!(plan.memory.allocated <= at_most);
    let line = "scratch of Module.Conv2dWeightBackward, 2 times";
    assert!(plan.to_string().contains(line), "{plan}");
    println!("{plan}");
    let json: serde_json::Value = serde_json::from_str(&plan.to_json().unwrap()).unwrap();
    assert_eq!(json["kernels"][0]["scratch"], scratch);
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
