//! The operations of gradient clipping in a graph: the norm of a rank's gradients, and the factor that follows from
//! the norms of all ranks.
//!
//! Sums are taken on the host, in 64 bits and in an order that depends only on the number of elements. Burn's own sum
//! of many elements is shared among threads, so a resumed run would not be bit-identical. Norms are sent instead of
//! sums of powers, because norms fit 32 bits on any device.

use burn::tensor::{DType, TensorData};
use burn_backend::TensorMetadata;
use burn_fsdp_mesh::{Clip, Measure, NonFinite, Norm};
use burn_fsdp_tensors as tensors;
use burn_ir::{BackendIr, CustomOpIr, HandleKind, ScalarIr, TensorIr};

use crate::custom::{CustomOperation, CustomOperations};
use crate::graph::CustomProfile;

/// The name under which a step reports its gradient norm.
pub const GRAD_NORM: &str = "grad_norm";

/// Returns the call that computes the norm of gradients, taken together as one vector.
pub(crate) fn local_norm(clip: &Clip, gradients: Vec<TensorIr>, norm: TensorIr) -> CustomOpIr {
    CustomOpIr {
        id: LOCAL_NORM.to_owned(),
        inputs: gradients,
        outputs: vec![norm],
        scalars: scalars(clip),
    }
}

/// Returns the call that computes the total norm and the factors from the norms of parts of the gradients. The first
/// output is the total norm. Every other output is the factor, each with its own shape and type.
pub(crate) fn coefficients(
    clip: &Clip,
    norms: Vec<TensorIr>,
    total: TensorIr,
    factors: Vec<TensorIr>,
) -> CustomOpIr {
    CustomOpIr {
        id: COEFFICIENTS.to_owned(),
        inputs: norms,
        outputs: [total].into_iter().chain(factors).collect(),
        scalars: scalars(clip),
    }
}

/// Adds the operations of gradient clipping to a set.
pub(crate) fn with_norms<B: BackendIr>(operations: CustomOperations<B>) -> CustomOperations<B> {
    operations.with(LocalNorm).with(Coefficients)
}

/// Name of the operation that computes the norm of a rank's gradients.
pub const LOCAL_NORM: &str = "burn_fsdp.local_norm";
/// Name of the operation that computes clipping factors.
pub const COEFFICIENTS: &str = "burn_fsdp.clip_coefficients";

struct LocalNorm;

struct Coefficients;

impl<B: BackendIr> CustomOperation<B> for LocalNorm {
    fn name(&self) -> &str {
        LOCAL_NORM
    }

    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<B>>,
    ) -> Result<Vec<HandleKind<B>>, String> {
        let (_, measure) = choice(call)?;
        let device = device::<B>(&inputs)?;
        let mut total = 0.0;
        for input in inputs {
            let data = read::<B>(input)?;
            let own = match data.dtype() {
                DType::F64 => measure.of_f64(data.as_bytes()),
                DType::F32 => measure.of_f32(data.as_bytes()),
                _ => measure.of_f32(data.convert_dtype(DType::F32).as_bytes()),
            };
            total = measure.join(total, own);
        }
        Ok(vec![number::<B>(
            &device,
            measure.root(total),
            &call.outputs[0],
        )])
    }

    fn profile(&self, _: &CustomOpIr) -> CustomProfile {
        CustomProfile::default()
    }
}

impl<B: BackendIr> CustomOperation<B> for Coefficients {
    fn name(&self) -> &str {
        COEFFICIENTS
    }

    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<B>>,
    ) -> Result<Vec<HandleKind<B>>, String> {
        let (clip, measure) = choice(call)?;
        let device = device::<B>(&inputs)?;
        let mut total = 0.0;
        for input in inputs {
            for norm in read::<B>(input)?.iter::<f64>() {
                let one = (norm as f32).to_ne_bytes();
                total = measure.join(total, measure.of_f32(&one));
            }
        }
        let total = measure.root(total);
        if clip.refuses_nonfinite() && !total.is_finite() {
            return Err(format!(
                "the norm of the gradients is {total}; continue from a checkpoint with a lower learning rate, look for a \
                 division by zero in the loss, or clip anyway with `NonFinite::Scale`"
            ));
        }
        let coefficient = clip.coefficient(total);
        let values = [total].into_iter().chain(std::iter::repeat(coefficient));
        let outputs = call.outputs.iter().zip(values);
        Ok(outputs
            .map(|(output, value)| number::<B>(&device, value, output))
            .collect())
    }

    fn profile(&self, _: &CustomOpIr) -> CustomProfile {
        CustomProfile::default()
    }
}

/// Returns the clipping settings that a call of either operation carries.
pub fn scalars(clip: &Clip) -> Vec<ScalarIr> {
    let order = match clip.measured() {
        Norm::P(p) => p,
        Norm::Infinity => f64::INFINITY,
    };
    vec![
        ScalarIr::Float(clip.max_norm()),
        ScalarIr::Float(order),
        ScalarIr::Bool(clip.refuses_nonfinite()),
    ]
}

fn choice(call: &CustomOpIr) -> Result<(Clip, Measure), String> {
    let [
        ScalarIr::Float(max_norm),
        ScalarIr::Float(order),
        ScalarIr::Bool(refuses),
    ] = call.scalars.as_slice()
    else {
        return Err("it does not have the scalars of a norm".to_owned());
    };
    let norm = Norm::P(*order);
    let nonfinite = match refuses {
        true => NonFinite::Refuse,
        false => NonFinite::Scale,
    };
    let measure = Measure::new(norm).ok_or_else(|| format!("there is no norm of order {order}"))?;
    Ok((Clip::to(*max_norm).norm(norm).nonfinite(nonfinite), measure))
}

fn device<B: BackendIr>(inputs: &[HandleKind<B>]) -> Result<B::Device, String> {
    match inputs.first() {
        Some(HandleKind::Float(tensor)) => Ok(tensor.device()),
        _ => Err("gradients must be float tensors".to_owned()),
    }
}

fn read<B: BackendIr>(tensor: HandleKind<B>) -> Result<TensorData, String> {
    match tensor {
        HandleKind::Float(_) => tensors::read(tensor),
        _ => Err("gradients must be float tensors".to_owned()),
    }
}

fn number<B: BackendIr>(device: &B::Device, value: f64, output: &TensorIr) -> HandleKind<B> {
    let data = TensorData::full(output.shape.clone(), value as f32);
    let data = data.convert_dtype(output.dtype);
    HandleKind::Float(B::float_from_data(data, device))
}
