//! Tests of formulas against graphs.

use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp_models::{Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant};
use burn_fsdp_plan::{Checkpointing, Job, Machine, Plan, Precision, TimePlan, Transformer};
use burn_fsdp_spmd::Strategy;
use burn_fsdp_spmd::passes::schedule::{Options, pipeline};
use burn_fsdp_spmd::trace::{TraceConfig, trace};

const CONFIG: GptConfig = GptConfig {
    layers: 3,
    dim: 64,
    heads: 4,
    vocab: 128,
    seq: 32,
};

const BATCH: usize = 2;

type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

fn tokens() -> Tokens {
    let zeros = || Tensor::<2, Int>::zeros([BATCH, CONFIG.seq], &Device::flex());
    (zeros(), zeros())
}

fn plan(options: &Options) -> Plan {
    let graph = trace(
        |device| CONFIG.init(device, 1).unwrap(),
        |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets),
        &AdamWConfig::new().build(),
        &tokens(),
        TraceConfig::default(),
    )
    .unwrap();
    let graph = pipeline(4, Strategy::FullShard, options, &[]).run(graph);
    Plan::new(&graph.unwrap(), &Machine::cpu(), 0).unwrap()
}

fn job() -> Job {
    Job {
        model: Transformer {
            name: "small".to_owned(),
            layers: CONFIG.layers,
            dim: CONFIG.dim,
            heads: CONFIG.heads,
            kv_heads: CONFIG.heads,
            hidden: 4 * CONFIG.dim,
            is_gated: false,
            has_bias: true,
            vocab: CONFIG.vocab,
            positions: CONFIG.seq,
        },
        ranks: 4,
        batch: BATCH,
        seq: CONFIG.seq,
        precision: Precision::F32,
        strategy: Strategy::FullShard,
        checkpointing: Checkpointing::None,
        is_offloaded: false,
        prefetch: 1,
    }
}

#[test]
fn formula_and_graph_count_the_same_states_and_arithmetic() {
    let (plan, job) = (plan(&Options::default()), job());
    let bytes = plan.memory.at_rest;
    let states = 12 * job.model.num_params() / 4;
    let graph = bytes.parameters + bytes.optimizer_state;
    // Every tensor's shard is rounded up to whole elements.
    assert!(graph.abs_diff(states) < 1000, "{graph} {states}");
    assert_eq!(plan.flops.matmul as f64, job.model_flops());
    assert_eq!(plan.flops.convolution, 0);
}

#[test]
fn formula_and_graph_gather_the_same_bytes() {
    let mut kept = Options::default();
    kept.reshard_after_forward = false;
    let plan = plan(&kept);
    let whole = 4 * job().model.num_params();
    assert_eq!(plan.traffic.all_gather.bytes, whole);
    assert_eq!(plan.traffic.reduce_scatter.bytes, whole);
    assert_eq!(plan.traffic.all_gather.sent, whole * 3 / 4);
}

#[test]
fn recomputation_and_reuse_save_memory() {
    let mut keeping = Options::default();
    keeping.recompute = None;
    let (with, without) = (plan(&Options::default()), plan(&keeping));
    assert!(with.memory.peak_bytes() < without.memory.peak_bytes());
    assert!(with.memory.peak_bytes() <= with.peak_without_reuse);
    assert!(with.memory.reused_in_place > 0);
}

#[test]
fn collectives_started_early_are_awaited_less() {
    let mut early = Options::default();
    early.prefetch = Some(true);
    let machine = Machine::cpu();
    let exposed = |options: &Options| plan(options).time.exposed;
    assert!(exposed(&early) < exposed(&Options::default()));
    let TimePlan { step, compute, .. } = plan(&early).time;
    assert!(step > compute && machine.achievable > 0.0);
}

#[test]
fn a_plan_is_printed_as_text_json_and_a_picture() {
    let plan = plan(&Options::default());
    let text = plan.to_string();
    for word in ["peak", "all_gather", "matrix products", "per step"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let json = plan.to_json().unwrap();
    assert!(
        json.contains("\"moments\":[{\"node\":0"),
        "{}",
        &json[..200]
    );
    {
        let svg = plan.to_svg();
        assert!(svg.contains("peak: ") && svg.contains("full parameters"));
    }
}

#[test]
fn a_llama_is_planned_like_any_module() {
    let config = LlamaConfig {
        layers: 2,
        dim: 32,
        heads: 4,
        kv_heads: 2,
        hidden: 48,
        vocab: 64,
        seq: 16,
        rope_base: 10_000,
        variant: LlamaVariant::PLAIN,
    };
    let zeros = || Tensor::<2, Int>::zeros([1, 16], &Device::flex());
    let graph = trace(
        move |device| config.init(device, 1).unwrap(),
        |model: &Llama, (tokens, targets): Tokens| model.loss(tokens, targets),
        &AdamWConfig::new().build(),
        &(zeros(), zeros()),
        TraceConfig::default(),
    )
    .unwrap();
    let graph = pipeline(2, Strategy::FullShard, &Options::default(), &[]).run(graph);
    let plan = Plan::new(&graph.unwrap(), &Machine::cpu(), 1).unwrap();
    let states = 12 * config.num_params() as u64 / 2;
    let bytes = plan.memory.at_rest;
    assert!((bytes.parameters + bytes.optimizer_state).abs_diff(states) < 1000);
}
