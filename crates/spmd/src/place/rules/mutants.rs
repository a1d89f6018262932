//! Faulty placement rules, derived from correct ones by seed. Types or the certificate must reject all of them, except
//! a few that only communicate more.

use std::cell::RefCell;
use std::collections::BTreeMap;

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_fsdp_mesh::{Mesh, Placement, ReduceOp};
use burn_ir::OperationIr;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use crate::certificate::Proof;
use crate::error::Error;
use crate::graph::{Graph, operation_name};
use crate::models::{Encoder, Gpt, Recurrent, sequences, tokens};
use crate::passes::Pipeline;
use crate::passes::schedule::{self, Options};
use crate::place::signature::Signature;
use crate::place::{Expand, ExpandPlacements};
use crate::trace::{TraceConfig, trace};

/// A kind of fault that a rule may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mutation {
    /// The letters of two dims of an operand are swapped.
    Exchanged,
    /// Results are reduced by a different reduction.
    OtherReduction,
    /// A dim that must be whole may be sharded.
    CutOfWhole,
    /// Parts are treated as addends.
    SummedParts,
    /// The operation is declared linear in its first operand.
    Linear,
    /// An operand is whole where the others are sharded.
    WholeOperand,
}

impl Mutation {
    const ALL: [Self; 6] = [
        Self::Exchanged,
        Self::OtherReduction,
        Self::CutOfWhole,
        Self::SummedParts,
        Self::Linear,
        Self::WholeOperand,
    ];

    /// Returns the wrong signature; `None` if the fault does not apply to the right one.
    fn of(self, signature: &Signature, seed: u64) -> Option<Signature> {
        let mut wrong = signature.clone();
        let rng = &mut StdRng::seed_from_u64(seed);
        match self {
            Self::Exchanged => {
                let input = rng.random_range(0..wrong.inputs.len().max(1));
                let letters = &mut wrong.inputs.get_mut(input)?.letters;
                let dims = letters.len();
                let (a, b) = (0..dims)
                    .flat_map(|a| (a + 1..dims).map(move |b| (a, b)))
                    .find(|(a, b)| letters[*a] != letters[*b])?;
                letters.swap(a, b);
            }
            Self::OtherReduction => {
                let ops: Vec<&mut ReduceOp> = wrong.contracted.values_mut().collect();
                let op = ops.into_iter().next()?;
                *op = match op {
                    ReduceOp::Sum => ReduceOp::Mean,
                    _ => ReduceOp::Sum,
                };
            }
            Self::CutOfWhole => {
                let result = wrong.outputs.first_mut()?;
                let whole = |letters: &[Option<char>]| letters.iter().position(Option::is_none);
                let dim = whole(&result.letters)?;
                let size = result.shape[dim];
                result.letters[dim] = Some('?');
                let input = wrong.inputs.first_mut()?;
                let own = whole(&input.letters).filter(|own| input.shape[*own] == size)?;
                input.letters[own] = Some('?');
            }
            Self::SummedParts => {
                let result = wrong.outputs.first_mut()?;
                let dim = result.letters.iter().position(Option::is_some)?;
                let letter = result.letters[dim].take()?;
                wrong.contracted.insert(letter, ReduceOp::Sum);
            }
            Self::Linear => {
                let input = wrong.inputs.first()?.id;
                let is_known = wrong.linear.iter().any(|set| set.contains(&input));
                wrong.linear.push(vec![input]);
                return (!is_known).then_some(wrong);
            }
            Self::WholeOperand => {
                let letters: Vec<char> = wrong.letters();
                let has = |letter: char| {
                    let inputs = signature.inputs.iter();
                    inputs
                        .filter(move |input| input.dim_of(letter).is_some())
                        .count()
                };
                let shared = letters.into_iter().find(|letter| has(*letter) > 1)?;
                let holders = wrong.inputs.iter_mut();
                let mut holders: Vec<_> = holders
                    .filter(|input| input.dim_of(shared).is_some())
                    .collect();
                // A tensor that is read twice has the same placement for both reads, so such a rule never shards it.
                if holders.windows(2).any(|pair| pair[0].id == pair[1].id) {
                    return None;
                }
                let input = rng.random_range(0..holders.len());
                let dim = holders[input].dim_of(shared)?;
                holders[input].letters[dim] = None;
            }
        }
        Some(wrong)
    }
}

/// A wrong rule.
#[derive(Debug, Clone)]
struct Fault {
    /// Name of the operation with this rule.
    operation: String,
    mutation: Mutation,
    seed: u64,
}

thread_local! {
    static FAULT: RefCell<Option<Fault>> = const { RefCell::new(None) };
}

/// Returns the wrong signature if this thread's fault is in the operation's rule, and otherwise the right one.
pub(super) fn applied(operation: &OperationIr, right: Signature) -> Signature {
    FAULT.with_borrow(|fault| match fault {
        Some(fault) if fault.operation == operation_name(operation) => {
            fault.mutation.of(&right, fault.seed).unwrap_or(right)
        }
        _ => right,
    })
}

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

/// Returns true for operations for which [`Mutation::Linear`] is no fault. Some are linear in only the first operand,
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
fn found(case: &Case, fault: &Fault, expand: &Expand, mesh: &Mesh) -> Option<(Found, String)> {
    let right = pipeline(expand, mesh).run(case.traced.clone()).unwrap();
    FAULT.set(Some(fault.clone()));
    let stages = pipeline(expand, mesh).stages(case.traced.clone());
    FAULT.set(None);
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
    let mut counts: BTreeMap<(Mutation, Found), usize> = BTreeMap::new();
    let mut made = 0;
    for seed in 0.. {
        let rng = &mut StdRng::seed_from_u64(seed);
        let case = cases.choose(rng).unwrap();
        let expand = placements(&case.traced, 2, rng);
        let node = case.traced.nodes().choose(rng).unwrap();
        let mutation = *Mutation::ALL.choose(rng).unwrap();
        if mutation == Mutation::Linear && is_linear(&node.operation) {
            continue;
        }
        let fault = Fault {
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
