//! The operations of softmax and of its logarithm.

use crate::pattern::Kind::{Add, Div, Exp, Log, Mul, Neg, Recip, Sub};
use crate::pattern::StepKind::{Is, MaxLast, Spread, SumLast};
use crate::pattern::{PatternKernel, PatternStep, Steps};

/// `y`, the softmax of `x` along the last dim.
pub(crate) const SOFTMAX: Steps = Steps {
    kernel: PatternKernel {
        name: "models.softmax",
        operands: &["x"],
        steps: &[
            PatternStep::new("y", Is(Div), &["exp", "sum"]),
            PatternStep::new("sum", SumLast, &["exp"]),
            PatternStep::new("exp", Is(Exp), &["shifted"]),
            PatternStep::new("shifted", Is(Sub), &["x", "max"]),
            PatternStep::new("max", MaxLast, &["x"]),
        ],
    },
    gradient: PatternKernel {
        name: "models.softmax_backward",
        operands: &["y", "grad"],
        steps: &[
            PatternStep::new("inverse", Is(Recip), &["sum"]),
            PatternStep::new("negative", Is(Neg), &["exp"]),
            PatternStep::new("square", Is(Mul), &["sum", "sum"]),
            PatternStep::new("slope", Is(Div), &["negative", "square"]),
            // The gradient of y is multiplied by the slope and by the inverse.
            PatternStep::new("through", Is(Mul), &["grad", "slope"]),
            PatternStep::new("direct", Is(Mul), &["grad", "inverse"]),
            PatternStep::new("total", SumLast, &["through"]),
            // Burn also sums over a dim with one element, which changes nothing.
            PatternStep::new("of sum", SumLast, &["total"]).optional("total"),
            PatternStep::new("spread", Spread, &["of sum"]),
            PatternStep::new("both", Is(Add), &["spread", "direct"]),
            PatternStep::new("again", Is(Exp), &["shifted"]).optional("exp"),
            PatternStep::new("of x", Is(Mul), &["both", "again"]),
        ],
    },
};

/// `y`, the logarithm of the softmax of `x`.
pub(crate) const LOG_SOFTMAX: Steps = Steps {
    kernel: PatternKernel {
        name: "models.log_softmax",
        operands: &["x"],
        steps: &[
            PatternStep::new("y", Is(Sub), &["shifted", "log"]),
            PatternStep::new("log", Is(Log), &["sum"]),
            PatternStep::new("sum", SumLast, &["exp"]),
            PatternStep::new("exp", Is(Exp), &["shifted"]),
            PatternStep::new("shifted", Is(Sub), &["x", "max"]),
            PatternStep::new("max", MaxLast, &["x"]),
        ],
    },
    gradient: PatternKernel {
        name: "models.log_softmax_backward",
        operands: &["y", "grad"],
        steps: &[
            PatternStep::new("inverse", Is(Recip), &["sum"]),
            PatternStep::new("product", Is(Mul), &["total", "inverse"]),
            PatternStep::new("total", SumLast, &["negative"]),
            PatternStep::new("negative", Is(Neg), &["grad"]),
            PatternStep::new("number", SumLast, &["product"]).optional("product"),
            PatternStep::new("spread", Spread, &["number"]),
            PatternStep::new("again", Is(Exp), &["shifted"]).optional("exp"),
            PatternStep::new("through", Is(Mul), &["spread", "again"]),
            PatternStep::new("of x", Is(Add), &["through", "grad"]),
        ],
    },
};
