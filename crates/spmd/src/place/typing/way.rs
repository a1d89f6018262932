//! How nodes run on the ranks of one axis.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp_kernels::PointwiseProgram;
use burn_fsdp_mesh::ReduceOp;
use burn_ir::{BaseOperationIr, OperationIr, TensorId};

use super::SpmdType;
use super::program::of_program;
use crate::graph::{Node, Trait, is};
use crate::kernels::is_program;
use crate::place::rules;

/// How a node runs on the ranks of one axis.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Way {
    /// It creates its results without operands, as a constant does.
    Made,
    /// It draws different random numbers on each rank.
    Drawn,
    /// It repeats a replicated value along a dim that its operands lack. Each rank may create all or part of that dim.
    Spread,
    /// Its results have the type of its operands.
    Alike(SpmdType),
    /// It runs on parts. Its results are parts, or addends of one of these reductions. If `is_local`, results without a
    /// declared type are parts.
    Parts {
        reductions: Vec<ReduceOp>,
        is_local: bool,
    },
}

impl Way {
    /// Returns the type of a result that is declared to have the type `said`, if any; `None` if it cannot have that
    /// type.
    pub(super) fn result(&self, said: Option<SpmdType>) -> Option<SpmdType> {
        let is_partial = |of: &SpmdType| matches!(of, SpmdType::Partial(_));
        match (self, said) {
            (Self::Made | Self::Spread, said) => said
                .or(Some(SpmdType::Replicate))
                .filter(|of| !is_partial(of)),
            (Self::Drawn, None) => Some(SpmdType::Varying),
            (Self::Drawn, Some(said)) => (said == SpmdType::Shard).then_some(said),
            (Self::Alike(own), None) => Some(*own),
            (Self::Alike(own), Some(said)) => (said == *own).then_some(said),
            (Self::Parts { is_local, .. }, None) => is_local.then_some(SpmdType::Shard),
            (Self::Parts { .. }, Some(SpmdType::Shard)) => Some(SpmdType::Shard),
            (Self::Parts { reductions, .. }, Some(SpmdType::Partial(op))) => {
                reductions.contains(&op).then_some(SpmdType::Partial(op))
            }
            (Self::Parts { .. }, Some(_)) => None,
        }
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Made => f.write_str("made from nothing"),
            Self::Drawn => f.write_str("drawn by each rank"),
            Self::Spread => f.write_str("repeated"),
            Self::Alike(of) => of.fmt(f),
            Self::Parts { .. } => f.write_str("made from parts"),
        }
    }
}

pub(super) fn is_drawn(node: &Node) -> bool {
    node.is_opaque() && node.custom.is_none()
}

/// Returns true if a result has a dim that no operand has.
pub(super) fn spreads(node: &Node) -> bool {
    if node.custom.is_some() || !rules::may_wait(&node.operation) {
        return false;
    }
    let signature = rules::signature(&node.operation);
    let is_given = |letter| {
        signature
            .inputs
            .iter()
            .any(|input| input.dim_of(letter).is_some())
    };
    signature
        .letters()
        .into_iter()
        .any(|letter| !is_given(letter))
}

/// The error of an operation that cannot run on parts.
pub(super) const WHOLE: &str = "it takes parts as the whole";

/// Returns the way of an operation of Burn that reads parts.
pub(super) fn parts(operation: &OperationIr) -> Result<Way, &'static str> {
    let signature = rules::signature(operation);
    let is_local = is(operation, Trait::Pointwise) || is(operation, Trait::View);
    if signature.letters().is_empty() && !is_local {
        return Err(WHOLE);
    }
    Ok(Way::Parts {
        reductions: signature.contracted.into_values().collect(),
        is_local,
    })
}

/// Returns the type of the result of a node that reads addends.
pub(super) fn addends(
    node: &Node,
    inputs: &[(TensorId, SpmdType)],
) -> Result<SpmdType, &'static str> {
    const NOT_LINEAR: &str = "it is not linear in the addends that it reads";
    if let OperationIr::Custom(call) = &node.operation
        && is_program(call)
    {
        let program = PointwiseProgram::from_scalars(&call.scalars);
        let types: Vec<SpmdType> = inputs.iter().map(|(_, of)| *of).collect();
        let of = program.and_then(|program| of_program(&program, &types));
        return of.ok_or(NOT_LINEAR);
    }
    let partial = inputs.iter().filter(|(_, of)| *of != SpmdType::Replicate);
    let partial: BTreeMap<TensorId, SpmdType> = partial.copied().collect();
    let mut ops = partial.values();
    let first = *ops.next().ok_or(NOT_LINEAR)?;
    let signature = match &node.operation {
        OperationIr::Custom(call) => rules::of_kernel(call).ok_or(NOT_LINEAR)?,
        operation => rules::signature(operation),
    };
    let is_set = |set: &Vec<TensorId>| {
        set.iter().copied().collect::<BTreeSet<_>>() == partial.keys().copied().collect()
    };
    let is_linear = signature.linear.iter().any(is_set)
        || cast_or_cleared(&node.operation).is_some_and(|id| is_set(&vec![id]));
    if is_linear && ops.all(|op| *op == first) {
        Ok(first)
    } else {
        Err(NOT_LINEAR)
    }
}

/// Returns the float operand of a cast, or of a node that clears padding. The node is linear in it.
fn cast_or_cleared(operation: &OperationIr) -> Option<TensorId> {
    if let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation {
        return Some(op.input.id);
    }
    let (OperationIr::BaseFloat(BaseOperationIr::MaskFill(op))
    | OperationIr::BaseInt(BaseOperationIr::MaskFill(op))) = operation
    else {
        return None;
    };
    (op.value.elem::<f64>() == 0.0).then_some(op.tensor.id)
}

/// Returns the way of a node that reads one owner's values, so the results belong to that owner; `None` if it reads no
/// owned value.
pub(super) fn of_owner(inputs: &[(TensorId, SpmdType)]) -> Result<Option<Way>, &'static str> {
    let mut owners = inputs.iter().filter_map(|(_, of)| of.owner());
    let Some(owner) = owners.next() else {
        return Ok(None);
    };
    let fits = |of: SpmdType| matches!(of, SpmdType::Replicate) || of.owner() == Some(owner);
    if inputs.iter().all(|(_, of)| fits(*of)) {
        Ok(Some(Way::Alike(SpmdType::Owned(owner))))
    } else {
        Err("it combines values of one owner with values of other ranks")
    }
}
