//! The operations that ranks execute together in a step.

use std::fmt;

/// One operation of a step. A number is a unit's position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
    /// The gather of a unit for its forward.
    UnshardForward(usize),
    /// The gather of a unit for its backward.
    UnshardBackward(usize),
    /// The reduction of a unit's gradients.
    Reduce(usize),
    /// The end of backward, with the reduction of the parameters kept whole.
    Finish,
}

impl Operation {
    pub(crate) fn unit(self) -> Option<usize> {
        match self {
            Self::UnshardForward(unit) | Self::UnshardBackward(unit) | Self::Reduce(unit) => {
                Some(unit)
            }
            Self::Finish => None,
        }
    }

    /// Returns true if the operation creates full parameters.
    pub(super) fn is_gather(self) -> bool {
        matches!(self, Self::UnshardForward(_) | Self::UnshardBackward(_))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnshardForward(unit) => write!(f, "forward unshard of unit {unit}"),
            Self::UnshardBackward(unit) => write!(f, "backward unshard of unit {unit}"),
            Self::Reduce(unit) => write!(f, "reduction of unit {unit}"),
            Self::Finish => f.write_str("end of backward"),
        }
    }
}
