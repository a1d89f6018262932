//! The types of values on one axis of the ranks, and what collectives make of them.

use std::fmt;

use burn_fsdp_mesh::{Placement, ReduceOp};

use crate::graph::CollectiveKind;

/// What the ranks of one axis hold of a value. A gradient has a type, too:
///
/// | type | the ranks hold | the complete gradient | what a use on parts, or on own rows, adds to the gradient |
/// |---|---|---|---|
/// | replicate | the same | replicate | an addend on each rank: partial(sum), or varying |
/// | shard | parts of one whole | shard | a part: shard |
/// | partial | addends of one whole | replicate: a sum hands its gradient to every addend | the same |
/// | varying | values of their own rows | varying | varying |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpmdType {
    /// All ranks hold the same value.
    Replicate,
    /// Every rank holds a part of one value.
    Shard,
    /// Every rank holds an addend of one value.
    Partial(ReduceOp),
    /// Every rank holds a value of its own: it comes of the rank's own rows, where ranks divide the batch and none of
    /// them knows of the joined one.
    Varying,
}

impl From<Placement> for SpmdType {
    fn from(placement: Placement) -> Self {
        match placement {
            Placement::Replicate => Self::Replicate,
            Placement::Shard(_) => Self::Shard,
            Placement::Partial(op) => Self::Partial(op),
        }
    }
}

/// Prints as `replicate`, `shard`, `partial(sum)` or `varying`.
impl fmt::Display for SpmdType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("replicate"),
            Self::Shard => f.write_str("shard"),
            Self::Partial(op) => write!(f, "partial({op})"),
            Self::Varying => f.write_str("varying"),
        }
    }
}

impl SpmdType {
    /// Returns a placement of this type, if it is one.
    pub(super) fn to_placement(self) -> Option<Placement> {
        match self {
            Self::Replicate => Some(Placement::Replicate),
            Self::Shard => Some(Placement::Shard(0)),
            Self::Partial(op) => Some(Placement::Partial(op)),
            Self::Varying => None,
        }
    }

    /// Returns the type of the complete gradient of a value of this type: that of the value, or for addends that of
    /// their sum.
    pub(crate) fn of_gradient(self) -> Self {
        match self {
            Self::Replicate | Self::Shard | Self::Varying => self,
            Self::Partial(_) => Self::Replicate,
        }
    }

    /// Returns true if a value of another type may stand where this one is expected.
    pub(crate) fn takes(self, other: Self) -> bool {
        // What is the same on all ranks is also each rank's own.
        self == other || (self == Self::Varying && other == Self::Replicate)
    }

    /// Returns the type of what a collective along the axis makes of a value of this type; an error says why it makes
    /// nothing of it.
    pub(crate) fn after(
        self,
        kind: CollectiveKind,
        reduction: Option<ReduceOp>,
    ) -> Result<Self, &'static str> {
        let combined = match kind {
            CollectiveKind::AllReduce => Self::Replicate,
            CollectiveKind::ReduceScatter => Self::Shard,
            CollectiveKind::AllGather => {
                return match self {
                    Self::Shard | Self::Varying => Ok(Self::Replicate),
                    Self::Replicate => Err("all ranks have the same of it already"),
                    Self::Partial(_) => Err("it puts addends side by side"),
                };
            }
            CollectiveKind::AllToAll => {
                return match self {
                    Self::Shard | Self::Varying => Ok(self),
                    Self::Replicate => Err("all ranks have the same of it already"),
                    Self::Partial(_) => Err("it exchanges addends"),
                };
            }
        };
        match (self, reduction) {
            (_, None) => Err("it combines, and does not say how"),
            (Self::Partial(op), Some(other)) if op == other => Ok(combined),
            (Self::Partial(_), Some(_)) => Err("its addends are of another reduction"),
            (Self::Varying, Some(_)) => Ok(combined),
            // The mean, the largest and the smallest of what all have alike are what they have.
            (Self::Replicate, Some(ReduceOp::Sum)) => {
                Err("all ranks have the same of it, and the sum counts it once for each")
            }
            (Self::Replicate, Some(_)) => Ok(combined),
            (Self::Shard, Some(_)) => Err("it combines parts that are of different elements"),
        }
    }

    /// Returns true if a reduction along another axis may come before the one that this type waits for.
    pub(crate) fn commutes_with(self, reduction: Option<ReduceOp>) -> bool {
        let is_sum = |op| matches!(op, ReduceOp::Sum | ReduceOp::Mean);
        match (self, reduction) {
            (Self::Partial(own), Some(other)) => own == other || is_sum(own) && is_sum(other),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};

    const SUM: SpmdType = SpmdType::Partial(ReduceOp::Sum);

    /// A parameter is gathered, and its gradient reduced, by collectives that are each other's gradients.
    #[test]
    fn the_gradient_of_a_gather_is_a_reduction_and_of_a_reduction_a_gather() {
        let gathered = SpmdType::Shard.after(AllGather, None).unwrap();
        assert_eq!(gathered, SpmdType::Replicate);
        // Each rank's use of what is the same on all adds to the gradient.
        let scattered = SUM.after(ReduceScatter, Some(ReduceOp::Sum)).unwrap();
        assert_eq!(scattered, SpmdType::Shard.of_gradient());
        let reduced = SUM.after(AllReduce, Some(ReduceOp::Sum)).unwrap();
        assert_eq!(reduced, SUM.of_gradient());
        assert_eq!(SpmdType::Shard.after(AllToAll, None), Ok(SpmdType::Shard));
    }

    #[test]
    fn nothing_is_reduced_twice_or_by_another_reduction() {
        let reduced = SUM.after(AllReduce, Some(ReduceOp::Sum)).unwrap();
        assert!(reduced.after(AllReduce, Some(ReduceOp::Sum)).is_err());
        assert!(reduced.after(AllReduce, Some(ReduceOp::Mean)).is_ok());
        assert!(SUM.after(AllReduce, Some(ReduceOp::Mean)).is_err());
        assert!(SUM.after(ReduceScatter, None).is_err());
        assert!(
            SpmdType::Shard
                .after(AllReduce, Some(ReduceOp::Sum))
                .is_err()
        );
        assert!(SUM.after(AllGather, None).is_err());
        assert!(!SUM.commutes_with(Some(ReduceOp::Max)));
        assert!(SUM.commutes_with(Some(ReduceOp::Mean)));
    }
}
