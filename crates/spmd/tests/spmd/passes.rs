//! Passes one by one, their order, and the verifier.

use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_spmd::Precision;
use burn_fsdp_spmd::graph::{CollectiveKind, Graph, Node, Phase, Role, Stage};
use burn_fsdp_spmd::passes::schedule::{self, OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{
    self, Bucket, CommonSubexpressions, DeadCode, Deduplicate, DeferOptimizer, EarlyOptimizer,
    GraphTransform, InsertCollectives, Liveness, PassId, Pipeline, Prefetch, Recompute, Regather,
    SinkWaits, Split, StandIns, verify,
};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Error, Strategy};

use crate::models::{Gpt, tokens};

pub(crate) fn gpt() -> Graph {
    gpt_of(2)
}

/// Returns the trace for a batch of the given number of rows.
fn gpt_of(rows: usize) -> Graph {
    let batch = tokens(0, 0, rows, &Device::flex());
    let optimizer = AdamWConfig::new().build();
    trace(
        Gpt::new,
        Gpt::loss,
        &optimizer,
        &batch,
        TraceConfig::default(),
    )
    .unwrap()
}

fn sharded() -> InsertCollectives {
    InsertCollectives {
        num_ranks: 2,
        style: Strategy::FullShard.into(),
        axis: "data".into(),
        replicate: None,
        precision: Precision::default(),
        owners: Default::default(),
    }
}

fn run(pipeline: Pipeline) -> Graph {
    pipeline.verified().run(gpt()).unwrap()
}

fn kinds(graph: &Graph) -> Vec<(CollectiveKind, Stage, Phase)> {
    let collectives = graph.nodes().iter().filter_map(|node| {
        let collective = node.collective.as_ref()?;
        Some((collective.kind, collective.stage, node.phase))
    });
    collectives.collect()
}

fn gathers(graph: &Graph, phase: Phase) -> usize {
    let is = |(kind, stage, of): &&(CollectiveKind, Stage, Phase)| {
        *kind == CollectiveKind::AllGather && *stage != Stage::Wait && *of == phase
    };
    kinds(graph).iter().filter(is).count()
}

#[test]
fn a_trace_knows_every_tensor_by_path_and_has_all_phases() {
    let graph = gpt();
    verify(&graph).unwrap();
    let parameter = graph.parameter("blocks.1.fc.weight").unwrap();
    assert_eq!(parameter.shape, [12, 48]);
    let gradient = graph.value(parameter.gradient.unwrap()).unwrap();
    assert_eq!(gradient.role, Role::Gradient("blocks.1.fc.weight".into()));
    let slots = parameter
        .states
        .iter()
        .map(|id| graph.value(*id).unwrap().role.to_string());
    let slots: Vec<_> = slots.collect();
    assert_eq!(
        slots,
        [
            "state blocks.1.fc.weight momentum.moment_1",
            "state blocks.1.fc.weight momentum.moment_2"
        ]
    );
    let count = |phase| {
        graph
            .nodes()
            .iter()
            .filter(|node| node.phase == phase)
            .count()
    };
    assert!(count(Phase::Forward) > 50 && count(Phase::Backward) > 100);
    let trained = graph
        .parameters()
        .iter()
        .filter(|parameter| parameter.gradient.is_some());
    assert_eq!(count(Phase::Optimizer) % trained.count(), 0);
    let inputs: Vec<_> = graph
        .inputs()
        .iter()
        .map(|id| graph.value(*id).unwrap().role.to_string())
        .collect();
    assert_eq!(inputs, ["input 0", "input 1"]);
}

#[test]
fn traces_of_one_model_are_equal() {
    assert_eq!(gpt().fingerprint(), gpt().fingerprint());
    let other = gpt_of(3);
    assert_ne!(gpt().fingerprint(), other.fingerprint());
    for (a, b) in gpt().parameters().iter().zip(other.parameters()) {
        assert_eq!((a.value, &a.states), (b.value, &b.states));
    }
}

#[test]
fn equal_things_are_computed_once_within_a_phase() {
    let before = gpt();
    let after = run(Pipeline::new().then(CommonSubexpressions));
    assert!(after.nodes().len() < before.nodes().len());
    assert!(after.constants().len() <= before.constants().len());
    // Parameters with equal initial values all remain.
    assert_eq!(after.parameters(), before.parameters());
}

#[test]
fn only_dead_code_is_removed() {
    let mut graph = gpt();
    let expected = graph.nodes().len();
    let loss = graph.loss().unwrap();
    let dead = graph.add_value([1], burn::tensor::DType::F32, Role::Temporary);
    let exp = burn_ir::UnaryOpIr {
        input: graph.read(loss).unwrap(),
        out: graph.write(dead).unwrap(),
    };
    let exp = burn_ir::FloatOperationIr::Exp(exp);
    let exp = burn_ir::OperationIr::Float(burn::tensor::DType::F32, exp);
    graph.push(Node::new(exp, Phase::Optimizer));
    let graph = Pipeline::new()
        .verified()
        .then(DeadCode)
        .run(graph)
        .unwrap();
    assert_eq!(graph.nodes().len(), expected);
    assert!(graph.value(dead).is_none());
}

#[test]
fn weights_are_gathered_per_use_then_once_then_once_per_visit() {
    let insert = run(Pipeline::new().then(StandIns).then(sharded()));
    let once = run(Pipeline::new()
        .then(StandIns)
        .then(sharded())
        .then(Deduplicate));
    let again = run(Pipeline::new()
        .then(StandIns)
        .then(sharded())
        .then(Deduplicate)
        .then(Regather));
    let sharded = once
        .parameters()
        .iter()
        .filter(|parameter| !parameter.is_buffer)
        .count();
    assert!(gathers(&insert, Phase::Backward) > 0);
    assert!(gathers(&insert, Phase::Forward) >= sharded);
    assert_eq!(gathers(&once, Phase::Forward), sharded);
    assert_eq!(gathers(&once, Phase::Backward), 0);
    assert_eq!(gathers(&again, Phase::Forward), sharded);
    // Backward reads no biases.
    let blocks = again.parameters().iter().filter(|parameter| {
        parameter.path.starts_with("blocks")
            && !parameter.path.contains("bias")
            && !parameter.path.contains("beta")
    });
    assert_eq!(gathers(&again, Phase::Backward), blocks.count());
}

#[test]
fn without_stand_ins_embeddings_are_gathered_in_backward() {
    let with = run(Pipeline::new()
        .then(StandIns)
        .then(sharded())
        .then(Deduplicate)
        .then(Regather));
    let without = run(Pipeline::new()
        .then(sharded())
        .then(Deduplicate)
        .then(Regather));
    assert_eq!(
        gathers(&without, Phase::Backward),
        gathers(&with, Phase::Backward) + 2
    );
}

#[test]
fn the_first_bucket_is_small_and_all_are_capped() {
    let bucket = Bucket {
        first_bytes: 1,
        cap_bytes: 6000,
    };
    let pipeline = || {
        Pipeline::new()
            .then(StandIns)
            .then(sharded())
            .then(Deduplicate)
            .then(Regather)
    };
    let graph = run(pipeline().then(bucket));
    let mut gathered = graph.nodes().iter().filter_map(|node| {
        let collective = node.collective.as_ref()?;
        (collective.kind == CollectiveKind::AllGather).then_some(collective)
    });
    // No two fit into the first bucket.
    assert_eq!(gathered.next().unwrap().parts.len(), 1);
    let mut joined = 0;
    for collective in gathered {
        let num_parts = collective.parts.len();
        assert!(
            num_parts == 1 || collective.num_bytes() <= 6000,
            "{}",
            collective.label
        );
        joined += usize::from(num_parts > 1);
    }
    assert!(joined > 0);
    let num_parts = |graph: &Graph| -> usize {
        let collectives = graph
            .nodes()
            .iter()
            .filter_map(|node| node.collective.as_ref());
        collectives.map(|collective| collective.parts.len()).sum()
    };
    assert_eq!(num_parts(&graph), num_parts(&run(pipeline())));
}

#[test]
fn prefetch_starts_the_next_gather_before_this_unit_computes() {
    let split = || {
        Pipeline::new()
            .then(StandIns)
            .then(sharded())
            .then(Deduplicate)
            .then(Regather)
            .then(Bucket::default())
            .then(Split)
    };
    let in_flight = |graph: &Graph| {
        let mut most = 0;
        let mut now: i64 = 0;
        let mut ahead = 0;
        for node in graph.nodes() {
            match node
                .collective
                .as_ref()
                .map(|collective| (collective.kind, collective.stage))
            {
                Some((CollectiveKind::AllGather, Stage::Start)) => now += 1,
                Some((CollectiveKind::AllGather, Stage::Wait)) => now -= 1,
                Some(_) => {}
                None => ahead += now,
            }
            most = most.max(now);
        }
        (most, ahead)
    };
    assert_eq!(in_flight(&run(split())), (1, 0));
    let (most, ahead) = in_flight(&run(split().then(Prefetch)));
    assert!(most == 1 && ahead > 100, "{most} {ahead}");
    verify(&run(split()
        .then(Prefetch)
        .then(SinkWaits)
        .then(EarlyOptimizer)
        .then(Liveness)))
    .unwrap();
}

#[test]
fn waits_sink_to_the_first_reader_or_the_next_reduction() {
    let split = || {
        Pipeline::new()
            .then(sharded())
            .then(Deduplicate)
            .then(Split)
    };
    let distance = |graph: &Graph| {
        let mut total = 0;
        let mut started = 0;
        for (index, node) in graph.nodes().iter().enumerate() {
            match node
                .collective
                .as_ref()
                .map(|collective| (collective.kind, collective.stage))
            {
                Some((CollectiveKind::ReduceScatter, Stage::Start)) => started = index,
                Some((CollectiveKind::ReduceScatter, Stage::Wait)) => total += index - started - 1,
                _ => {}
            }
        }
        total
    };
    assert_eq!(distance(&run(split())), 0);
    assert!(distance(&run(split().then(SinkWaits))) > 50);
}

#[test]
fn recomputing_lowers_the_bytes_kept_for_backward() {
    let kept = |graph: &Graph| -> usize {
        let forward = graph
            .nodes()
            .iter()
            .filter(|node| node.phase == Phase::Forward);
        let made: std::collections::BTreeSet<_> = forward.flat_map(Node::outputs).collect();
        let backward = graph
            .nodes()
            .iter()
            .filter(|node| node.phase == Phase::Backward);
        let read: std::collections::BTreeSet<_> = backward.flat_map(Node::inputs).collect();
        let both = made.intersection(&read);
        both.map(|id| graph.value(*id).unwrap().num_bytes()).sum()
    };
    let before = run(Pipeline::new().then(DeadCode));
    let after = run(Pipeline::new()
        .then(DeadCode)
        .then(Recompute { min_bytes: 1 }));
    assert!(
        kept(&after) * 10 < kept(&before) * 9,
        "{} of {}",
        kept(&after),
        kept(&before)
    );
    assert!(after.nodes().len() > before.nodes().len());
}

#[test]
fn the_optimizer_moves_up_to_its_gradients() {
    let last_backward = |graph: &Graph| {
        let nodes = graph.nodes();
        nodes
            .iter()
            .rposition(|node| node.phase == Phase::Backward)
            .unwrap()
    };
    let before = run(Pipeline::new().then(sharded()));
    let after = run(Pipeline::new().then(sharded()).then(EarlyOptimizer));
    assert_eq!(before.nodes().len(), after.nodes().len());
    let optimizer = |graph: &Graph| {
        let nodes = graph.nodes()[..last_backward(graph)].iter();
        nodes.filter(|node| node.phase == Phase::Optimizer).count()
    };
    assert_eq!(optimizer(&before), 0);
    assert!(optimizer(&after) > 100);
    // This is the default.
    let of = |options: &Options| {
        let passes = schedule::pipeline(2, Strategy::FullShard, options, &[]);
        optimizer(&passes.run(gpt()).unwrap())
    };
    assert!(of(&Options::default()) > 100);
    let at_end = Options::default().optimizer(OptimizerPlace::AtEnd);
    assert_eq!(of(&at_end), 0);
}

#[test]
fn passes_are_applied_once_and_in_order() {
    let twice = Pipeline::new()
        .then(DeadCode)
        .then(DeadCode)
        .run(gpt())
        .unwrap_err();
    assert!(
        matches!(
            twice,
            Error::PassTwice {
                pass: PassId::DeadCode
            }
        ),
        "{twice}"
    );
    let text = twice.to_string();
    assert!(
        text.contains("dead code") && text.contains("apply it once"),
        "{text}"
    );
    let early = Pipeline::new().then(Deduplicate).run(gpt()).unwrap_err();
    assert!(
        matches!(
            early,
            Error::PassOrder {
                pass: PassId::Deduplicate,
                relation: "after",
                other: PassId::InsertCollectives
            }
        ),
        "{early}"
    );
    // Merging gathers would undo the second ones.
    let undo = Pipeline::new()
        .then(sharded())
        .then(Deduplicate)
        .then(Regather);
    let undo = passes::apply(&CommonSubexpressions, undo.run(gpt()).unwrap()).unwrap_err();
    assert!(
        matches!(
            undo,
            Error::PassOrder {
                relation: "before",
                ..
            }
        ),
        "{undo}"
    );
    let late = Pipeline::new()
        .then(Liveness)
        .then(DeadCode)
        .run(gpt())
        .unwrap_err();
    assert!(
        matches!(
            late,
            Error::PassOrder {
                relation: "before",
                ..
            }
        ),
        "{late}"
    );
}

fn last() -> Pipeline {
    Pipeline::new().then(Liveness)
}

#[test]
fn the_optimizer_is_deferred_once_and_before_it_is_moved_elsewhere() {
    let order = |pipeline: Pipeline| {
        let graph = pipeline.run(gpt()).unwrap();
        DeferOptimizer
            .split(graph, &last())
            .unwrap_err()
            .to_string()
    };
    let early = order(Pipeline::new());
    assert!(
        early.contains("after") && early.contains("insert collectives"),
        "{early}"
    );
    let moved = order(Pipeline::new().then(sharded()).then(EarlyOptimizer));
    assert!(
        moved.contains("before") && moved.contains("early optimizer"),
        "{moved}"
    );
    let parts = DeferOptimizer.split(Pipeline::new().then(sharded()).run(gpt()).unwrap(), &last());
    let parts = parts.unwrap();
    let again = DeferOptimizer
        .split(parts.main.clone(), &last())
        .unwrap_err()
        .to_string();
    assert!(again.contains("liveness"), "{again}");
    // Every node is in the main graph, and in one of the others.
    let count = |graph: &Graph| graph.nodes().iter().filter(|node| !node.is_drop()).count();
    assert_eq!(
        count(&parts.main),
        count(&parts.setup) + count(&parts.cleanup)
    );
    let is_optimizer = |node: &Node| node.phase == Phase::Optimizer;
    assert!(!parts.setup.nodes().iter().any(is_optimizer));
    assert!(parts.cleanup.nodes().iter().all(is_optimizer));
    assert!(parts.cleanup.loss().is_none() && parts.cleanup.inputs().is_empty());
    for graph in [&parts.setup, &parts.main, &parts.cleanup] {
        passes::verify(graph).unwrap();
    }
}

/// A pass that breaks the graph in some way.
#[derive(Debug)]
struct Break(fn(&mut Vec<Node>));

impl GraphTransform for Break {
    fn id(&self) -> PassId {
        PassId::User("break")
    }

    fn transform(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut nodes = graph.take_nodes();
        (self.0)(&mut nodes);
        graph.set_nodes(nodes);
        Ok(graph)
    }
}

fn fault(faulty: fn(&mut Vec<Node>)) -> (&'static str, String) {
    let mut options = Options::default();
    options.prefetch = Some(true);
    let graph = schedule::pipeline(2, Strategy::FullShard, &options, &[])
        .verified()
        .run(gpt());
    match Pipeline::new()
        .verified()
        .then(Break(faulty))
        .run(graph.unwrap())
    {
        Err(Error::InvalidGraph {
            rule,
            after: Some(PassId::User("break")),
            operation,
            reason,
            ..
        }) => (rule, format!("{operation}: {reason}")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_verifier_names_the_rule_and_the_faulty_node() {
    // A node is missing that writes a needed value.
    let (rule, at) = fault(|nodes| {
        let matmul = nodes
            .iter()
            .position(|node| node.name() == "Custom.models.matmul")
            .unwrap();
        nodes.remove(matmul);
    });
    assert!(
        rule.contains("before it is written") && at.contains("has not been written yet"),
        "{rule} {at}"
    );
    // The same node twice.
    let (rule, at) = fault(|nodes| {
        let matmul = nodes
            .iter()
            .position(|node| node.name() == "Custom.models.matmul")
            .unwrap();
        nodes.insert(matmul, nodes[matmul].clone());
    });
    assert!(
        rule.contains("written once") && at.starts_with("Custom.models.matmul"),
        "{rule} {at}"
    );
    // A value dropped before its last reader.
    let (rule, at) = fault(|nodes| {
        let drop = nodes.iter().rposition(Node::is_drop).unwrap();
        let node = nodes.remove(drop);
        let dropped = node.inputs().next();
        let reader = nodes
            .iter()
            .position(|node| node.inputs().any(|id| Some(id) == dropped));
        nodes.insert(reader.unwrap(), node);
    });
    assert!(
        rule.contains("after it is dropped") && at.contains(" dropped %"),
        "{rule} {at}"
    );
    // A missing wait.
    let (rule, at) = fault(|nodes| {
        let wait = nodes.iter().rposition(|node| {
            node.collective
                .as_ref()
                .is_some_and(|collective| collective.stage == Stage::Wait)
                && node.name() == "wait_all_reduce"
        });
        nodes.remove(wait.unwrap());
    });
    assert!(
        rule.contains("written") || rule.contains("wait"),
        "{rule} {at}"
    );
    // Forward after backward.
    let (rule, at) = fault(|nodes| {
        let last = nodes
            .iter()
            .rposition(|node| node.phase == Phase::Backward)
            .unwrap();
        nodes[last].phase = Phase::Forward;
    });
    assert!(
        rule.contains("phases") && at.contains("forward node"),
        "{rule} {at}"
    );
    assert!(passes::verify::rules().count() >= 10);
}

#[test]
fn weights_that_outlive_the_unit_after_next_are_found() {
    let pipeline = Pipeline::new()
        .then(StandIns)
        .then(sharded())
        .then(Deduplicate)
        .then(Regather);
    let graph = pipeline.run(gpt()).unwrap();
    // A block's gather in backward is replaced by the gathered weights of its forward.
    let keep = |nodes: &mut Vec<Node>| {
        let of = |node: &Node, phase| {
            let collective = node.collective.as_ref();
            let is_gather = collective.is_some_and(|c| {
                c.kind == CollectiveKind::AllGather && &*c.label == "blocks.0.fc.weight"
            });
            is_gather && node.phase == phase
        };
        let first = nodes
            .iter()
            .position(|node| of(node, Phase::Forward))
            .unwrap();
        let second = nodes
            .iter()
            .position(|node| of(node, Phase::Backward))
            .unwrap();
        let kept = nodes[first].outputs().next().unwrap();
        let gone = nodes.remove(second).outputs().next().unwrap();
        struct Rename(burn_ir::TensorId, burn_ir::TensorId);
        impl burn_ir::IrVisitorMut for Rename {
            fn visit_tensor_mut(&mut self, tensor: &mut burn_ir::TensorIr) {
                if tensor.id == self.0 {
                    tensor.id = self.1;
                }
            }
        }
        for node in nodes {
            node.operation.visit_mut(&mut Rename(gone, kept));
        }
    };
    let error = Pipeline::new()
        .verified()
        .then(Break(keep))
        .run(graph)
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("die before the unit after next") && text.contains("blocks.0"),
        "{text}"
    );
}

#[test]
fn views_that_outlive_the_unit_after_next_are_found() {
    let pipeline = Pipeline::new()
        .then(StandIns)
        .then(sharded())
        .then(Deduplicate)
        .then(Regather);
    let mut graph = pipeline.run(gpt()).unwrap();
    verify(&graph).unwrap();
    let mut nodes = graph.take_nodes();
    let is_gather = |node: &Node| {
        let collective = node.collective.as_ref();
        let label = collective.map(|collective| &*collective.label);
        label == Some("blocks.0.fc.weight") && node.phase == Phase::Forward
    };
    let first = nodes.iter().position(is_gather).unwrap();
    let weight = nodes[first].outputs().next().unwrap();
    let shape = graph.value(weight).unwrap().shape.clone();
    let mut view = |of| {
        let out = graph.add_value(shape.clone(), burn::tensor::DType::F32, Role::Temporary);
        let operation = burn_ir::BaseOperationIr::Reshape(burn_ir::ShapeOpIr {
            input: graph.read(of).unwrap(),
            out: graph.write(out).unwrap(),
        });
        (out, burn_ir::OperationIr::BaseFloat(operation))
    };
    let (early, operation) = view(weight);
    nodes.insert(first + 1, Node::new(operation, Phase::Forward));
    // Nothing reads the weight itself any more, but the memory is the same.
    let (_, operation) = view(early);
    let is_backward = |node: &Node| node.phase == Phase::Backward;
    let last = nodes.iter().rposition(is_backward).unwrap();
    nodes.insert(last + 1, Node::new(operation, Phase::Backward));
    graph.set_nodes(nodes);
    let text = verify(&graph).unwrap_err().to_string();
    assert!(
        text.contains("die before the unit after next") && text.contains("blocks.0"),
        "{text}"
    );
}

#[test]
fn ranks_must_start_the_same_collectives() {
    let graph = run(Pipeline::new().then(sharded()).then(Deduplicate));
    let mut other = graph.clone();
    let mut nodes = other.take_nodes();
    let first = nodes
        .iter()
        .position(|node| node.collective.is_some())
        .unwrap();
    let second = (first + 1..nodes.len())
        .find(|index| nodes[*index].collective.is_some())
        .unwrap();
    nodes.swap(first, second);
    other.set_nodes(nodes);
    passes::verify::verify_ranks([&graph, &graph.clone()]).unwrap();
    let error = passes::verify::verify_ranks([&graph, &other])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("on rank 1") && error.contains("but rank 0 has"),
        "{error}"
    );
}

#[test]
fn an_optimizer_that_is_not_elementwise_is_refused_on_shards() {
    use burn::optim::LambConfig;
    let batch = Tensor::<2>::ones([4, 3], &Device::flex());
    let init = |device: &Device| LinearConfig::new(3, 2).init(device);
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).mean();
    let optimizer = LambConfig::new().build();
    match trace(init, loss, &optimizer, &batch, TraceConfig::default()) {
        Ok(graph) => {
            let error = Pipeline::new().then(sharded()).run(graph).unwrap_err();
            assert!(
                matches!(error, Error::OptimizerNotElementwise { .. }),
                "{error}"
            );
        }
        Err(error) => panic!("{error}"),
    }
}
