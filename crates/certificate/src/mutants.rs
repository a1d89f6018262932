//! Wrong placement rules: types or the proof must reject all of them, except a few that only communicate more.

use std::collections::BTreeMap;

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_fsdp_mesh::{Mesh, Placement};
use burn_fsdp_spmd::graph::{Graph, operation_name};
use burn_fsdp_spmd::passes::Pipeline;
use burn_fsdp_spmd::passes::schedule::{self, Options};
use burn_fsdp_spmd::place::ExpandPlacements;
use burn_fsdp_spmd::place::mutants::{RuleMutation, WrongRule};
use burn_fsdp_spmd::trace::{TraceConfig, trace};
use burn_fsdp_spmd::{Error, Expand};
use burn_ir::OperationIr;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use crate::models::{Encoder, Gpt, Recurrent, sequences, tokens};
use crate::proof::Proof;

struct Case {
    name: &'static str,
    traced: Graph,
}

fn cases() -> Vec<Case> {
    let device = Device::flex();
    let optimizer = AdamWConfig::new().build();
    let config = TraceConfig::default;
    let batch = tokens(0, 0, 4, &device);
    let gpt = trace(Gpt::new, Gpt::loss, &optimizer, &batch, config());
    let batch = sequences(0, 5, &device);
    let lstm = trace(
        Recurrent::new,
        Recurrent::loss,
        &optimizer,
        &batch,
        config(),
    );
    let batch = sequences(0, 8, &device);
    let encoder = Encoder::without_dropout;
    let encoder = trace(encoder, Encoder::loss, &optimizer, &batch, config());
    let named = [("gpt", gpt), ("lstm", lstm), ("encoder", encoder)];
    named
        .map(|(name, traced)| Case {
            name,
            traced: traced.unwrap(),
        })
        .into()
}

/// Returns random placements: the batch along one axis, dims of parameters along the other.
fn placements(graph: &Graph, ranks: usize, rng: &mut StdRng) -> Expand {
    let mut expand = Expand::new();
    if rng.random_bool(0.5) {
        expand = expand.input("**", "data", Placement::Shard(0));
    }
    for parameter in graph.parameters().iter().filter(|of| !of.is_buffer) {
        let dims = parameter.shape.iter().enumerate();
        let cut: Vec<usize> = dims
            .filter(|(_, size)| **size >= ranks)
            .map(|(dim, _)| dim)
            .collect();
        if let Some(dim) = cut.choose(rng).filter(|_| rng.random_bool(0.8)) {
            expand = expand.parameter(&parameter.path, "model", Placement::Shard(*dim));
        }
    }
    expand
}

fn pipeline(expand: &Expand, mesh: &Mesh) -> Pipeline {
    let insert = ExpandPlacements::new(expand.clone(), mesh.clone());
    let options = Options::default().kernels(false);
    schedule::placed(insert, &options, mesh.axes().to_vec(), &[]).verified()
}

/// Returns true for operations for which [`RuleMutation::Linear`] is no fault. Some are linear in only the first operand,
/// which their rules omit because it would not help. Others add a number, which is right for the addends of a mean.
fn is_linear(operation: &OperationIr) -> bool {
    let name = operation_name(operation);
    let linear = [
        "Mul",
        "Div",
        "Cast",
        "Matmul",
        "Linear",
        "MaskFill",
        "CumSum",
        "AddScalar",
        "SubScalar",
    ];
    let last = name.rsplit('.').next().unwrap_or_default();
    linear.contains(&last)
}

/// The outcome of a wrong rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    /// Its letters are inconsistent, or the types of values do not fit, so there is no plan.
    ByTypes,
    /// The plan does not compute the traced step.
    ByProof,
    /// The plan is correct but communicates more, because the fault only prevents the operation from reading sharded
    /// tensors.
    Costlier,
    /// The fault was not detected.
    Not,
}

/// Returns the number of elements that a plan's collectives carry.
fn carried(plan: &Graph) -> usize {
    let collectives = plan
        .nodes()
        .iter()
        .filter_map(|node| node.collective.as_ref());
    let parts = collectives.flat_map(|collective| &collective.parts);
    parts.map(|part| part.partition.num_elements()).sum()
}

/// Returns the outcome of a fault; `None` if the plan is unchanged.
fn found(case: &Case, fault: &WrongRule, expand: &Expand, mesh: &Mesh) -> Option<(Found, String)> {
    let right = pipeline(expand, mesh).run(case.traced.clone()).unwrap();
    let stages = fault.during(|| pipeline(expand, mesh).stages(case.traced.clone()));
    let stages = match stages {
        Err(error) => return Some((Found::ByTypes, error.to_string())),
        Ok(stages) => stages,
    };
    if stages.last().map(Graph::fingerprint) == Some(right.fingerprint()) {
        return None;
    }
    let proof = Proof {
        mesh,
        clip: None,
        joined: Some(expand),
    };
    let is_costlier = stages.last().map(carried) > Some(carried(&right));
    Some(match proof.of_passes(&stages) {
        Err(error @ Error::NotCertified { .. }) => (Found::ByProof, error.to_string()),
        Ok(_) if is_costlier => (Found::Costlier, String::new()),
        other => (Found::Not, format!("{other:?}")),
    })
}

/// `BURN_FSDP_LONG=1` tries 500 faults.
#[test]
fn wrong_rules_are_refused() {
    let wanted = match std::env::var_os("BURN_FSDP_LONG") {
        None => 40,
        Some(_) => 500,
    };
    let cases = cases();
    let mesh = Mesh::new([("data", 2), ("model", 2)]).unwrap();
    let mut counts: BTreeMap<(RuleMutation, Found), usize> = BTreeMap::new();
    let mut made = 0;
    for seed in 0.. {
        let rng = &mut StdRng::seed_from_u64(seed);
        let case = cases.choose(rng).unwrap();
        let expand = placements(&case.traced, 2, rng);
        let node = case.traced.nodes().choose(rng).unwrap();
        let mutation = *RuleMutation::ALL.choose(rng).unwrap();
        if mutation == RuleMutation::Linear && is_linear(&node.operation) {
            continue;
        }
        let fault = WrongRule {
            operation: operation_name(&node.operation),
            mutation,
            seed,
        };
        let Some((found, what)) = found(case, &fault, &expand, &mesh) else {
            continue;
        };
        if matches!(found, Found::Not | Found::Costlier) {
            println!("seed {seed}: {}, {fault:?}: {what}", case.name);
        }
        *counts.entry((fault.mutation, found)).or_default() += 1;
        made += 1;
        if made == wanted {
            break;
        }
    }
    println!("{counts:?}");
    assert!(!counts.keys().any(|(_, found)| *found == Found::Not));
    let costlier = counts
        .iter()
        .filter(|((_, found), _)| *found == Found::Costlier);
    let costlier: usize = costlier.map(|(_, count)| count).sum();
    assert!(100 * costlier <= made, "{costlier} of {made} did nothing");
}
