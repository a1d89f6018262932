//! Tests that proofs reject passes with planted faults. Some faults occur only at large shapes.

use std::collections::{BTreeMap, BTreeSet};

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Clip, LossScaling, Mesh};
use burn_ir::TensorId;

use crate::error::{Error, ProofError};
use crate::graph::{Graph, Node, rename};
use crate::lower::{certify, certify_at};
use crate::mode::Mode;
use crate::models::{Gpt, tokens};
use crate::pass_id::PassId;
use crate::passes::schedule::{OptimizerPlace, Options};
use crate::trace::{TraceConfig, trace};
use crate::transform::GraphTransform;
use crate::{Certificate, Strategy};

/// Rows of a run. Activations then have some hundred thousand elements.
const ROWS: usize = 2_048;

/// Rows of a proof: enough for Burn's `Linear` to multiply them as in the run.
const FEW: usize = 64;

/// Wraps a pass, and plants a fault in its result.
#[derive(Debug)]
struct Faulty {
    pass: Box<dyn GraphTransform>,
    fault: fn(&Graph, Graph) -> Graph,
}

impl GraphTransform for Faulty {
    fn id(&self) -> PassId {
        self.pass.id()
    }

    fn after(&self) -> &'static [PassId] {
        self.pass.after()
    }

    fn before(&self) -> &'static [PassId] {
        self.pass.before()
    }

    fn acts_on(&self, graph: &Graph) -> bool {
        self.pass.acts_on(graph)
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        let before = graph.clone();
        Ok((self.fault)(&before, self.pass.transform(graph)?))
    }
}

/// Plants a fault in the pass, if its id is `of`.
fn planted(
    pass: Box<dyn GraphTransform>,
    of: PassId,
    fault: fn(&Graph, Graph) -> Graph,
) -> Box<dyn GraphTransform> {
    if pass.id() == of {
        Box::new(Faulty { pass, fault })
    } else {
        pass
    }
}

/// Counts the elements of a value in a graph.
type Count = fn(&Graph, TensorId) -> usize;

/// Returns the number of elements that a value has in the graph.
fn own(graph: &Graph, id: TensorId) -> usize {
    graph.value(id).map_or(0, |value| value.num_elements())
}

/// Returns the number of elements by which passes judge a value.
fn decisive(graph: &Graph, id: TensorId) -> usize {
    graph.sizes().elements(id, own(graph, id))
}

/// Makes the first new node of a pass that reads at least `least` elements read another value of the same shape.
fn misread(before: &Graph, mut graph: Graph, least: usize, count: Count) -> Graph {
    let known: BTreeSet<String> = before.nodes().iter().map(form).collect();
    let mut nodes = graph.take_nodes();
    let is_new = |node: &Node| node.collective.is_none() && !known.contains(&form(node));
    let mut places = (0..nodes.len()).filter(|index| is_new(&nodes[*index]));
    let found = places.find_map(|index| {
        let inputs = nodes[index].inputs();
        let mut inputs = inputs.filter(|input| count(before, *input) >= least);
        inputs.find_map(|input| Some((index, input, other(&graph, &nodes[..index], input)?)))
    });
    if let Some((index, input, other)) = found {
        rename(
            &mut nodes[index].operation,
            &BTreeMap::from([(input, other)]),
        );
    }
    graph.set_nodes(nodes);
    graph
}

/// Returns a node's operation, operands and results as text, which distinguishes a pass's new nodes from old ones.
fn form(node: &Node) -> String {
    let ids =
        |ids: &mut dyn Iterator<Item = TensorId>| ids.map(|id| id.value()).collect::<Vec<_>>();
    let (mut inputs, mut outputs) = (node.inputs(), node.outputs());
    format!(
        "{} {:?} {:?}",
        node.name(),
        ids(&mut inputs),
        ids(&mut outputs)
    )
}

/// Returns the last written value with the same shape as the given one.
fn other(graph: &Graph, nodes: &[Node], of: TensorId) -> Option<TensorId> {
    let value = graph.value(of)?;
    let mut written = nodes.iter().rev().flat_map(Node::outputs);
    written.find(|id| {
        *id != of
            && graph
                .value(*id)
                .is_some_and(|other| (&other.shape, other.dtype) == (&value.shape, value.dtype))
    })
}

const LARGE: usize = 1 << 16;

fn recompute_if_large(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::Recompute, |b, a| misread(b, a, LARGE, own))
}

fn recompute_where_it_acts(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::Recompute, |b, a| {
        misread(b, a, LARGE, decisive)
    })
}

fn fuse_if_large(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::FusePointwise, |b, a| {
        misread(b, a, LARGE, own)
    })
}

fn fuse_where_it_acts(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::FusePointwise, |b, a| {
        misread(b, a, LARGE, decisive)
    })
}

fn select_if_large(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::SelectKernels, |b, a| {
        misread(b, a, LARGE, own)
    })
}

fn select_where_it_acts(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::SelectKernels, |b, a| {
        misread(b, a, LARGE, decisive)
    })
}

fn traced(rows: usize, scales_loss: bool) -> Graph {
    let config = TraceConfig {
        scales_loss,
        ..TraceConfig::default()
    };
    let batch = tokens(0, 0, rows, &Device::flex());
    let optimizer = AdamWConfig::new().build();
    trace(Gpt::new, Gpt::loss, &optimizer, &batch, config).unwrap()
}

fn two_ranks(options: Options) -> Mode {
    Mode::data_parallel(ProcessGroup::fake(2, 0), Strategy::FullShard).options(options)
}

/// Proves a plan of many rows as `train --certify` does.
fn at_large(mode: &Mode, num_batches: usize) -> Result<Certificate, Error> {
    let scales = mode.options.loss_scaling.is_some();
    let [real, small] = [ROWS, FEW].map(|rows| traced(rows, scales));
    certify_at(real, small, num_batches, mode)
}

/// Returns the settings under which plans of many rows are proved: name, mode and number of micro-batches.
fn settings() -> Vec<(&'static str, Mode, usize)> {
    let default = Options::default;
    let mesh = Mesh::new([("replicate", 2), ("shard", 2)]).unwrap();
    let mesh = ProcessMesh::new(&ProcessGroup::fake(4, 0), mesh).unwrap();
    let hybrid = Mode::hybrid(mesh, "replicate", Strategy::FullShard).unwrap();
    let in_next = default().optimizer(OptimizerPlace::InNextForward);
    let clipped = default().clip_grad_norm(Clip::to(0.5));
    let scaled = default().scale_loss(LossScaling::default());
    vec![
        ("default", two_ranks(default()), 1),
        ("one rank", Mode::single(), 1),
        ("clipped", two_ranks(clipped.clone()), 1),
        ("prefetched", two_ranks(default().prefetch(true)), 1),
        ("in the next forward", two_ranks(in_next), 1),
        ("accumulated", two_ranks(clipped), 2),
        ("scaled", two_ranks(scaled), 2),
        (
            "again",
            two_ranks(default().recompute_units(["blocks.*"])),
            1,
        ),
        ("hybrid", hybrid, 1),
    ]
}

/// Correct plans are proved at the sizes of a run.
#[test]
fn plans_of_many_rows_are_proved() {
    for (setting, mode, batches) in settings() {
        let proof = at_large(&mode, batches).unwrap_or_else(|error| panic!("{setting}: {error}"));
        println!("{setting}: {proof}");
    }
}

/// A pass that decides by sizes, and its fault. The flag is true if the fault occurs wherever the pass treats a value
/// as large, and false if it occurs only where a value is large.
type Case = (
    PassId,
    fn(Box<dyn GraphTransform>) -> Box<dyn GraphTransform>,
    bool,
);

const FAULTS: [Case; 6] = [
    (PassId::Recompute, recompute_if_large, false),
    (PassId::FusePointwise, fuse_if_large, false),
    (PassId::SelectKernels, select_if_large, false),
    (PassId::Recompute, recompute_where_it_acts, true),
    (PassId::FusePointwise, fuse_where_it_acts, true),
    (PassId::SelectKernels, select_where_it_acts, true),
];

#[test]
fn faults_at_large_shapes_are_found_and_named() {
    const SETTINGS: [&str; 4] = ["default", "accumulated", "in the next forward", "hybrid"];
    let settings = settings().into_iter();
    for (setting, mode, batches) in settings.filter(|(name, ..)| SETTINGS.contains(name)) {
        for (expected, fault, by_proof) in FAULTS {
            let what = format!("{setting}, {expected}, by proof: {by_proof}");
            let mode = mode.clone().planting(fault);
            let (pass, node) = match at_large(&mode, batches) {
                Err(Error::NotCertified { pass, node, .. }) if by_proof => (pass, node),
                Err(Error::Proof(ProofError::Twin { pass, node, .. })) if !by_proof => (pass, node),
                other => panic!("{what}: {other:?}"),
            };
            assert_eq!(pass, Some(expected), "{what}");
            assert!(
                by_proof && batches > 1 || node.is_some() || setting == "in the next forward",
                "{what}"
            );
        }
    }
}

/// A proof at few rows does not cover many rows if the passes decide by the sizes at few rows.
#[test]
fn faults_at_large_shapes_are_not_found_at_small_ones() {
    for (pass, fault, _) in FAULTS {
        let mode = two_ranks(Options::default()).planting(fault);
        let proof = certify(traced(1, false), 1, &mode);
        proof.unwrap_or_else(|error| panic!("{pass}: {error}"));
    }
}

/// A user's pass that changes nothing.
#[derive(Debug)]
struct Idle;

impl GraphTransform for Idle {
    fn id(&self) -> PassId {
        PassId::User("idle")
    }

    fn transform(&self, graph: Graph) -> Result<Graph, Error> {
        Ok(graph)
    }
}

/// Passes before and after a user's pass are proved.
#[test]
fn passes_around_a_custom_pass_are_proved() {
    let clipped = Options::default().clip_grad_norm(Clip::to(0.5));
    for options in [Options::default(), clipped] {
        let mode = two_ranks(options).transform(Idle);
        let proof = at_large(&mode, 1).unwrap();
        assert_eq!(proof.assumed[0], PassId::User("idle"));
        for (expected, fault) in [
            (PassId::Recompute, recompute_where_it_acts as fn(_) -> _),
            (PassId::FusePointwise, fuse_where_it_acts),
        ] {
            match at_large(&mode.clone().planting(fault), 1) {
                Err(Error::NotCertified { pass, .. }) => assert_eq!(pass, Some(expected)),
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
}

/// If a pass after gradient clipping is faulty, it is named instead of the clipping.
#[test]
fn the_faulty_pass_after_clipping_is_named() {
    let options = Options::default().clip_grad_norm(Clip::to(0.5));
    let stages = |fault| {
        let mode = two_ranks(options.clone()).planting(fault);
        certify(traced(ROWS / 64, false), 1, &mode)
    };
    match stages(fuse_where_small) {
        Err(Error::NotCertified { pass, .. }) => assert_eq!(pass, Some(PassId::FusePointwise)),
        other => panic!("{other:?}"),
    }
}

fn fuse_where_small(pass: Box<dyn GraphTransform>) -> Box<dyn GraphTransform> {
    planted(pass, PassId::FusePointwise, |b, a| misread(b, a, 64, own))
}
