//! A table of the traits of Burn's operations, used by passes and placement rules.
//!
//! Each of Burn's enums of operations has one match here, and no match has a wildcard arm. If a later version of Burn
//! adds an operation, this file does not compile until the operation has an entry, so none gets traits by accident.

use burn_ir::{
    ActivationOperationIr, BaseOperationIr, BoolOperationIr, DistributedOperationIr,
    FloatOperationIr, IntOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
};

/// A property of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trait {
    /// Elementwise on floats and their masks: every element of the results depends only on the elements at the same
    /// position. An optimizer that consists of such operations can run on any part of a parameter.
    Elementwise,
    /// Pointwise: every element of the results depends only on the elements at the same position, after broadcasting.
    Pointwise,
    /// Cheap: recomputing the operation costs no more than reading and writing memory.
    Cheap,
    /// Linear: from terms that sum to the operands, it computes terms that sum to the result.
    Linear,
    /// Linear for floats, but not for integers, whose results are rounded.
    LinearOnFloats,
    /// A view: the result shares the memory of the first operand, on a backend with strided views such as Flex.
    View,
    /// A cast: the result has the operand's elements in a given type.
    Cast,
    /// Opaque: the result depends on earlier operations or on other ranks.
    Opaque,
}

/// An operation's entry in the table.
struct Row {
    name: &'static str,
    traits: &'static [Trait],
}

/// Generates the entries of one of Burn's enums.
macro_rules! rows {
    ($operation:expr, $of:ident { $($name:ident [$($is:ident)*])+ }) => {
        match $operation {
            $($of::$name(_) => Row { name: stringify!($name), traits: &[$(Trait::$is),*] }),+
        }
    };
}

/// Returns an operation's family, its entry, and the traits of the entry that do not hold in this family.
fn entry(operation: &OperationIr) -> (&'static str, Option<Row>, &'static [Trait]) {
    // The table describes floats, and no optimizer updates integers.
    const ON_INTEGERS: &[Trait] = &[Trait::Elementwise, Trait::LinearOnFloats];
    match operation {
        OperationIr::BaseFloat(op) => ("BaseFloat", Some(base(op)), &[]),
        OperationIr::BaseInt(op) => ("BaseInt", Some(base(op)), ON_INTEGERS),
        OperationIr::BaseBool(op) => ("BaseBool", Some(base(op)), &[]),
        OperationIr::NumericFloat(_, op) => ("NumericFloat", Some(numeric(op)), &[]),
        OperationIr::NumericInt(_, op) => ("NumericInt", Some(numeric(op)), ON_INTEGERS),
        OperationIr::Bool(op) => ("Bool", Some(bool(op)), &[]),
        OperationIr::Int(op) => ("Int", Some(int(op)), &[]),
        OperationIr::Float(_, op) => ("Float", Some(float(op)), &[]),
        OperationIr::Module(op) => ("Module", Some(module(op)), &[]),
        OperationIr::Activation(op) => ("Activation", Some(activation(op)), &[]),
        OperationIr::Distributed(op) => ("Distributed", Some(distributed(op)), &[]),
        OperationIr::Init(_) => ("Init", None, &[]),
        OperationIr::Custom(_) => ("Custom", None, &[]),
        OperationIr::Drop(_) => ("Drop", None, &[]),
    }
}

/// Returns true if an operation of Burn has a trait. Custom operations have none here, see
/// [`CustomProfile`](super::CustomProfile).
pub fn is(operation: &OperationIr, asked: Trait) -> bool {
    let (_, row, never) = entry(operation);
    row.is_some_and(|row| row.traits.contains(&asked)) && !never.contains(&asked)
}

/// Returns the name of an operation, such as `Float.Matmul` or `Module.Conv2d`.
pub fn operation_name(operation: &OperationIr) -> String {
    if let OperationIr::Custom(custom) = operation {
        return format!("Custom.{}", custom.id);
    }
    match entry(operation) {
        (family, Some(row), _) => format!("{family}.{}", row.name),
        (family, None, _) => family.to_owned(),
    }
}

#[rustfmt::skip]
fn base(operation: &BaseOperationIr) -> Row {
    rows!(operation, BaseOperationIr {
        Reshape [View Cheap]
        SwapDims [View]
        Permute [View]
        Flip []
        Expand [View]
        Unfold [View]
        Slice [View]
        SliceAssign []
        Select []
        SelectAssign []
        MaskWhere [Elementwise Pointwise Cheap]
        MaskFill [Elementwise Pointwise Cheap]
        Gather []
        Scatter []
        ScatterNd []
        GatherNd []
        Equal [Elementwise Pointwise Cheap]
        EqualElem [Elementwise Pointwise Cheap]
        RepeatDim [Cheap]
        Cat [Cheap]
        Cast [Elementwise Pointwise Cheap Cast]
        Empty []
        Ones [Elementwise Cheap]
        Zeros [Elementwise Cheap]
        NotEqual [Elementwise Pointwise Cheap]
        NotEqualElem [Elementwise Pointwise Cheap]
        All []
        Any []
        AllDim []
        AnyDim []
    })
}

#[rustfmt::skip]
fn numeric(operation: &NumericOperationIr) -> Row {
    rows!(operation, NumericOperationIr {
        Add [Elementwise Pointwise Cheap Linear]
        AddScalar [Elementwise Pointwise Cheap]
        Sub [Elementwise Pointwise Cheap Linear]
        SubScalar [Elementwise Pointwise Cheap]
        Div [Elementwise Pointwise Cheap]
        DivScalar [Elementwise Pointwise Cheap LinearOnFloats]
        Rem [Elementwise Pointwise]
        RemScalar [Elementwise Pointwise]
        Mul [Elementwise Pointwise Cheap]
        MulScalar [Elementwise Pointwise Cheap Linear]
        Abs [Elementwise Pointwise Cheap]
        Full [Elementwise Cheap]
        MeanDim []
        Mean []
        Sum []
        SumDim []
        SumDims []
        Prod []
        ProdDim []
        Greater [Elementwise Pointwise Cheap]
        GreaterElem [Elementwise Pointwise Cheap]
        GreaterEqual [Elementwise Pointwise Cheap]
        GreaterEqualElem [Elementwise Pointwise Cheap]
        Lower [Elementwise Pointwise Cheap]
        LowerElem [Elementwise Pointwise Cheap]
        LowerEqual [Elementwise Pointwise Cheap]
        LowerEqualElem [Elementwise Pointwise Cheap]
        ArgMax []
        ArgTopK []
        TopK []
        TopKWithIndices []
        ArgMin []
        Max []
        MaxDimWithIndices []
        MinDimWithIndices []
        Min []
        MaxDim []
        MinDim []
        MaxAbs []
        MaxAbsDim []
        Clamp [Elementwise Pointwise Cheap]
        IntRandom [Opaque]
        Powi [Elementwise Pointwise Cheap]
        PowiScalar [Elementwise Pointwise]
        CumSum []
        CumProd []
        CumMin []
        CumMax []
        Neg [Elementwise Pointwise Cheap Linear]
        Sign [Elementwise Pointwise Cheap]
        ClampMin [Elementwise Pointwise]
        ClampMax [Elementwise Pointwise]
        Sort []
        SortWithIndices []
        ArgSort []
        Pad []
    })
}

#[rustfmt::skip]
fn float(operation: &FloatOperationIr) -> Row {
    rows!(operation, FloatOperationIr {
        Exp [Elementwise Pointwise Cheap]
        Log [Elementwise Pointwise Cheap]
        Log1p [Elementwise Pointwise Cheap]
        Erf [Elementwise Pointwise Cheap]
        PowfScalar [Elementwise Pointwise Cheap]
        Sqrt [Elementwise Pointwise Cheap]
        Cos [Elementwise Pointwise]
        Cosh [Elementwise Pointwise]
        Sin [Elementwise Pointwise]
        Sinh [Elementwise Pointwise]
        Tan [Elementwise Pointwise]
        Tanh [Elementwise Pointwise Cheap]
        ArcCos [Elementwise Pointwise]
        ArcCosh [Elementwise Pointwise]
        ArcSin [Elementwise Pointwise]
        ArcSinh [Elementwise Pointwise]
        ArcTan [Elementwise Pointwise]
        ArcTanh [Elementwise Pointwise]
        ArcTan2 [Elementwise Pointwise]
        Round [Elementwise Pointwise]
        Floor [Elementwise Pointwise]
        Ceil [Elementwise Pointwise]
        Trunc [Elementwise Pointwise]
        IntoInt [Pointwise]
        Matmul []
        Cross []
        Random [Opaque]
        Recip [Elementwise Pointwise Cheap]
        IsNan [Elementwise Pointwise]
        IsInf [Elementwise Pointwise]
        Quantize []
        Dequantize []
        GridSample2d []
        Powf [Elementwise Pointwise]
        Hypot [Elementwise Pointwise]
    })
}

#[rustfmt::skip]
fn int(operation: &IntOperationIr) -> Row {
    rows!(operation, IntOperationIr {
        IntoFloat [Pointwise Linear]
        BitwiseAnd [Pointwise]
        BitwiseAndScalar [Pointwise]
        BitwiseOr [Pointwise]
        BitwiseOrScalar [Pointwise]
        BitwiseXor [Pointwise]
        BitwiseXorScalar [Pointwise]
        BitwiseNot [Pointwise]
        BitwiseLeftShift [Pointwise]
        BitwiseLeftShiftScalar [Pointwise]
        BitwiseRightShift [Pointwise]
        BitwiseRightShiftScalar [Pointwise]
        Matmul []
    })
}

#[rustfmt::skip]
fn bool(operation: &BoolOperationIr) -> Row {
    rows!(operation, BoolOperationIr {
        IntoFloat [Elementwise Pointwise Cheap]
        IntoInt [Pointwise Cheap]
        Not [Elementwise Pointwise Cheap]
        And [Elementwise Pointwise Cheap]
        Or [Elementwise Pointwise Cheap]
        Xor [Elementwise Pointwise Cheap]
    })
}

#[rustfmt::skip]
fn activation(operation: &ActivationOperationIr) -> Row {
    rows!(operation, ActivationOperationIr {
        Relu [Pointwise Cheap]
        ReluBackward [Pointwise Cheap]
        LeakyRelu [Pointwise Cheap]
        PRelu [Cheap]
        Gelu [Pointwise Cheap]
        GeluBackward [Pointwise Cheap]
        Sigmoid [Pointwise Cheap]
        SigmoidBackward [Pointwise Cheap]
        HardSigmoid [Pointwise Cheap]
        LogSigmoid [Pointwise Cheap]
        LogSigmoidBackward [Pointwise Cheap]
        Softmax [Cheap]
        LogSoftmax [Cheap]
        Softmin [Cheap]
    })
}

#[rustfmt::skip]
fn module(operation: &ModuleOperationIr) -> Row {
    rows!(operation, ModuleOperationIr {
        BatchNorm []
        Embedding []
        EmbeddingBackward []
        Linear []
        LinearXBackward []
        LinearWeightBackward []
        LinearBiasBackward []
        Conv1d []
        Conv1dXBackward []
        Conv1dWeightBackward []
        Conv1dBiasBackward []
        Conv2d []
        Conv2dXBackward []
        Conv2dWeightBackward []
        Conv2dBiasBackward []
        Conv3d []
        Conv3dXBackward []
        Conv3dWeightBackward []
        Conv3dBiasBackward []
        DeformableConv2d []
        DeformableConv2dBackward []
        ConvTranspose1d []
        ConvTranspose2d []
        ConvTranspose3d []
        AvgPool1d []
        AvgPool2d []
        AvgPool1dBackward []
        AvgPool2dBackward []
        AdaptiveAvgPool1d []
        AdaptiveAvgPool2d []
        AdaptiveAvgPool1dBackward []
        AdaptiveAvgPool2dBackward []
        AdaptiveAvgPool3d []
        AdaptiveAvgPool3dBackward []
        MaxPool1d []
        MaxPool1dWithIndices []
        MaxPool1dWithIndicesBackward []
        MaxPool2d []
        MaxPool2dWithIndices []
        MaxPool2dWithIndicesBackward []
        Interpolate []
        InterpolateBackward []
        Attention []
        CtcLoss []
        CtcLossBackward []
        LayerNorm []
        Unfold4d []
        ConvTranspose1dWeightBackward []
        ConvTranspose1dBiasBackward []
        ConvTranspose2dWeightBackward []
        ConvTranspose2dBiasBackward []
        ConvTranspose3dWeightBackward []
        ConvTranspose3dBiasBackward []
    })
}

fn distributed(operation: &DistributedOperationIr) -> Row {
    let traits = &[Trait::Opaque];
    let name = match operation {
        DistributedOperationIr::AllReduce(_) => "AllReduce",
        DistributedOperationIr::SyncCollective => "SyncCollective",
    };
    Row { name, traits }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use burn_ir::{CastOpIr, ScalarIr, ScalarOpIr, TensorId, TensorIr, UnaryOpIr};

    use super::*;

    fn tensor(id: u64, dtype: DType) -> TensorIr {
        TensorIr::uninit(TensorId::new(id), [2, 3].into(), dtype)
    }

    #[test]
    fn operations_have_burns_names() {
        let (input, out) = (tensor(0, DType::F32), tensor(1, DType::F32));
        let exp = FloatOperationIr::Exp(UnaryOpIr {
            input: input.clone(),
            out: out.clone(),
        });
        let cast = BaseOperationIr::Cast(CastOpIr { input, out });
        let named = [
            (OperationIr::Float(DType::BF16, exp), "Float.Exp"),
            (OperationIr::BaseFloat(cast.clone()), "BaseFloat.Cast"),
            (OperationIr::BaseBool(cast), "BaseBool.Cast"),
            (OperationIr::Drop(tensor(0, DType::F32)), "Drop"),
        ];
        for (operation, name) in named {
            assert_eq!(operation_name(&operation), name);
        }
    }

    #[test]
    fn integers_are_rounded() {
        let divided = |dtype| {
            NumericOperationIr::DivScalar(ScalarOpIr {
                lhs: tensor(0, dtype),
                rhs: ScalarIr::Int(2),
                out: tensor(1, dtype),
            })
        };
        let float = OperationIr::NumericFloat(DType::F32, divided(DType::F32));
        let int = OperationIr::NumericInt(DType::I32, divided(DType::I32));
        assert!(is(&float, Trait::LinearOnFloats) && !is(&int, Trait::LinearOnFloats));
        assert!(is(&float, Trait::Elementwise) && !is(&int, Trait::Elementwise));
        assert!(is(&float, Trait::Pointwise) && is(&int, Trait::Pointwise));
    }
}
