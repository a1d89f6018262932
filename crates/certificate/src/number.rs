//! The field as the numbers of kernels' composed forms.

use burn_fsdp_kernels::{Array, FormScalar, Number, PointwiseOperation};

use super::field::{self, Element};
use super::pointwise;
use super::products;
use super::scalar::Scalar;
use super::tensor::{Kind, Tensor};

/// An element of the field as a number of a composed form.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FieldNumber(pub(super) Element);

impl FieldNumber {
    /// Returns a tensor of elements as one of numbers.
    pub(super) fn all_of(tensor: &Tensor) -> Array<Self> {
        let elements = tensor.elements.iter().copied().map(Self);
        Array::new(tensor.shape.clone(), elements.collect())
    }

    /// Returns a tensor of numbers as one of elements.
    pub(super) fn elements_of(array: Array<Self>) -> Tensor {
        let elements = array.elements.into_iter().map(|number| number.0);
        Tensor::new(array.shape, elements.collect())
    }

    /// Returns the scalar of a call as one of a composed form.
    pub(super) fn scalar(scalar: Scalar) -> FormScalar<Self> {
        match scalar {
            Scalar::Number(number) => FormScalar::Number(number),
            Scalar::Symbol(element) => FormScalar::Unknown(Self(element)),
        }
    }
}

fn of_form(scalar: FormScalar<FieldNumber>) -> Scalar {
    match scalar {
        FormScalar::Number(number) => Scalar::Number(number),
        FormScalar::Unknown(number) => Scalar::Symbol(number.0),
    }
}

impl Number for FieldNumber {
    const ONE: Self = Self(1);

    fn add(self, other: Self) -> Self {
        Self(field::add(self.0, other.0))
    }

    fn sub(self, other: Self) -> Self {
        Self(field::sub(self.0, other.0))
    }

    fn mul(self, other: Self) -> Self {
        Self(field::mul(self.0, other.0))
    }

    fn inverse(self) -> Self {
        Self(field::inverse(self.0))
    }

    fn is_above(self, other: Self) -> bool {
        field::order(self.0) > field::order(other.0)
    }

    fn of_integer(value: i64) -> Self {
        Self(field::of_integer(value))
    }

    fn of_scalar(scalar: FormScalar<Self>) -> Self {
        Self(of_form(scalar).element(Kind::Float))
    }

    fn index(self) -> usize {
        self.0 as usize
    }

    fn function(name: &str, argument: Self) -> Self {
        Self(field::function(name, &[argument.0]))
    }

    fn step(
        operation: PointwiseOperation,
        (a, of_a): (Self, Option<FormScalar<Self>>),
        (b, of_b): (Self, Option<FormScalar<Self>>),
    ) -> Self {
        let (a, b) = ((a.0, of_a.map(of_form)), (b.0, of_b.map(of_form)));
        Self(pointwise::step(operation, a, b))
    }

    fn matmul(a: &Array<Self>, b: &Array<Self>, shape: &[usize]) -> Result<Array<Self>, String> {
        let [a, b] = [a, b].map(|of| Self::elements_of(of.clone()));
        Ok(Self::all_of(&products::matmul(&a, &b, shape)?))
    }
}
