//! The scalar arguments of operations.

use burn_ir::ScalarIr;

use super::field::{Element, function, inverse, of_integer, of_number};
use super::tensor::Kind;
use burn_fsdp_spmd::graph::Node;

/// A scalar argument of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scalar {
    /// A number that is the same in every step.
    Number(ScalarIr),
    /// A number that the optimizer recomputes in each step, represented by the same unknown wherever it is used.
    Symbol(Element),
}

impl Scalar {
    /// Returns the scalars of a node in Burn's order.
    pub(super) fn all_of(node: &Node) -> Vec<Self> {
        let mut all: Vec<Self> = node.scalar_values().into_iter().map(Self::Number).collect();
        let path = node.path.as_deref().unwrap_or_default();
        for slot in &node.scalars {
            for offset in 0..slot.len {
                if let Some(scalar) = all.get_mut(slot.first + offset) {
                    let place = [slot.position as u64, offset as u64];
                    *scalar = Self::Symbol(function(path, &place));
                }
            }
        }
        all
    }

    /// Converts the scalar to an element of tensors of this kind.
    pub(super) fn element(self, kind: Kind) -> Element {
        match (self, kind) {
            (Self::Symbol(element), _) => element,
            (Self::Number(ScalarIr::Float(number)), Kind::Float) => of_number(number),
            (Self::Number(scalar), Kind::Float) => of_integer(scalar.elem()),
            (Self::Number(scalar), Kind::Int | Kind::Bool) => scalar.elem::<i64>() as u64,
        }
    }

    /// Returns the reciprocal. For a known number, this is the factor of a multiplication that replaces the division.
    pub(super) fn inverse(self) -> Element {
        match self {
            Self::Symbol(element) => inverse(element),
            Self::Number(scalar) => of_number(1.0 / scalar.elem::<f64>()),
        }
    }

    /// Returns the number; `None` for a symbol.
    pub(super) fn number(self) -> Option<f64> {
        match self {
            Self::Symbol(_) => None,
            Self::Number(scalar) => Some(scalar.elem()),
        }
    }
}
