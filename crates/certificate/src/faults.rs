//! Tests that proofs reject passes with planted faults. Some faults occur only at large shapes.

use std::collections::{BTreeMap, BTreeSet};

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Clip, LossScaling, Mesh};
use burn_fsdp_spmd::graph::{Graph, Node, rename};
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::passes::{GraphTransform, PassId};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Error, Mode, ProofError, Strategy};
use burn_ir::TensorId;

use crate::certify::{certify_at_hooked, certify_hooked};
use crate::models::{Gpt, tokens};
use crate::proof::Certificate;

/// Rows of a run. Activations then have some hundred thousand elements.
const ROWS: usize = 2_048;

/// Rows of a proof: enough for Burn's `Linear` to multiply them as in the run.
const FEW: usize = 64;

/// A fault that is planted in the result of a pass, given the graphs before and after the pass.
type Fault = (PassId, fn(&Graph, Graph) -> Graph);

/// Returns a hook that plants a fault.
fn planted(fault: Option<Fault>) -> impl FnMut(&'static str, &mut Graph) -> Result<(), Error> {
    let mut last: Option<(&'static str, Graph)> = None;
    move |part, graph| {
        let before = last.take().filter(|(of, _)| *of == part);
        if let (Some((_, mut before)), Some((pass, fault))) = (before, fault)
            && graph.applied().last() == Some(&pass)
            && before.applied().len() < graph.applied().len()
        {
            before.decide_by(graph.sizes().clone());
            *graph = fault(&before, std::mem::take(graph));
        }
        last = Some((part, graph.clone()));
        Ok(())
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

/// Faults of passes on large values. The flag is true if the fault occurs wherever the pass treats a value as large,
/// and false if it occurs only where a value is large.
const FAULTS: [(Fault, bool); 6] = [
    ((PassId::Recompute, if_large), false),
    ((PassId::FusePointwise, if_large), false),
    ((PassId::SelectKernels, if_large), false),
    ((PassId::Recompute, where_it_acts), true),
    ((PassId::FusePointwise, where_it_acts), true),
    ((PassId::SelectKernels, where_it_acts), true),
];

fn if_large(before: &Graph, after: Graph) -> Graph {
    misread(before, after, LARGE, own)
}

fn where_it_acts(before: &Graph, after: Graph) -> Graph {
    misread(before, after, LARGE, decisive)
}

fn where_small(before: &Graph, after: Graph) -> Graph {
    misread(before, after, 64, own)
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
fn at_large(setting: &Setting, fault: Option<Fault>) -> Result<Certificate, Error> {
    let (name, mode, num_batches) = setting;
    let traces = [ROWS, FEW].map(|rows| traced(rows, *name == "scaled"));
    certify_at_hooked(traces, *num_batches, mode, &mut planted(fault))
}

/// A setting's name, mode and number of micro-batches.
type Setting = (&'static str, Mode, usize);

/// Returns the settings under which plans of many rows are proved.
fn settings() -> Vec<Setting> {
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
    for setting in settings() {
        let proof = at_large(&setting, None);
        let proof = proof.unwrap_or_else(|error| panic!("{}: {error}", setting.0));
        println!("{}: {proof}", setting.0);
    }
}

#[test]
fn faults_at_large_shapes_are_found_and_named() {
    const SETTINGS: [&str; 4] = ["default", "accumulated", "in the next forward", "hybrid"];
    let settings = settings().into_iter();
    for setting in settings.filter(|(name, ..)| SETTINGS.contains(name)) {
        for (fault @ (expected, _), by_proof) in FAULTS {
            let what = format!("{}, {expected}, by proof: {by_proof}", setting.0);
            let (pass, node) = match at_large(&setting, Some(fault)) {
                Err(Error::NotCertified { pass, node, .. }) if by_proof => (pass, node),
                Err(Error::Proof(ProofError::Twin { pass, node, .. })) if !by_proof => (pass, node),
                other => panic!("{what}: {other:?}"),
            };
            assert_eq!(pass, Some(expected), "{what}");
            assert!(
                by_proof && setting.2 > 1 || node.is_some() || setting.0 == "in the next forward",
                "{what}"
            );
        }
    }
}

/// A proof at few rows does not cover many rows if the passes decide by the sizes at few rows.
#[test]
fn faults_at_large_shapes_are_not_found_at_small_ones() {
    for (fault @ (pass, _), _) in FAULTS {
        let mode = two_ranks(Options::default());
        let hook = &mut planted(Some(fault));
        let proof = certify_hooked(traced(1, false), 1, &mode, hook);
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
        let setting = ("idle", two_ranks(options).transform(Idle), 1);
        let proof = at_large(&setting, None).unwrap();
        assert_eq!(proof.assumed[0], PassId::User("idle"));
        for expected in [PassId::Recompute, PassId::FusePointwise] {
            match at_large(&setting, Some((expected, where_it_acts))) {
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
    let fault = (
        PassId::FusePointwise,
        where_small as fn(&Graph, Graph) -> Graph,
    );
    let hook = &mut planted(Some(fault));
    match certify_hooked(traced(ROWS / 64, false), 1, &two_ranks(options), hook) {
        Err(Error::NotCertified { pass, .. }) => assert_eq!(pass, Some(PassId::FusePointwise)),
        other => panic!("{other:?}"),
    }
}
