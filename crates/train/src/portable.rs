//! Step outputs as tensors that one process can send to another.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use burn::tensor::kind::Basic;
use burn::tensor::{Bytes, Device, Tensor, TensorData};
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use burn_pack::{Reader, Scalar, Tensor as PackedTensor, Writer};

use burn_fsdp_glue::error::Error;

/// A step's output for the metrics of Burn's loop, as tensors that can be sent to rank 0 if ranks are processes.
///
/// Burn's outputs of classification, regression and sequences implement it. For a custom type, pack everything that
/// the metrics read:
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::internals::train::{Parcel, Portable};
/// use burn_fsdp::Error;
///
/// struct Reconstruction {
///     loss: Tensor<1>,
///     picture: Tensor<4>,
/// }
///
/// impl Portable for Reconstruction {
///     fn pack(self, parcel: &mut Parcel) {
///         parcel.put("loss", self.loss);
///         parcel.put("picture", self.picture);
///     }
///
///     fn unpack(parcel: &mut Parcel, device: &Device) -> Result<Self, Error> {
///         let (loss, picture) = (parcel.take("loss", device)?, parcel.take("picture", device)?);
///         Ok(Self { loss, picture })
///     }
/// }
///
/// let device = Device::flex();
/// let mut parcel = Parcel::new();
/// let (loss, picture) = (Tensor::ones([1], &device), Tensor::ones([1, 3, 2, 2], &device));
/// Reconstruction { loss, picture }.pack(&mut parcel);
/// assert_eq!(Reconstruction::unpack(&mut parcel, &device)?.picture.dims(), [1, 3, 2, 2]);
/// # Ok::<(), Error>(())
/// ```
pub trait Portable: Sized {
    /// Puts the tensors into a parcel, each under a distinct name.
    fn pack(self, parcel: &mut Parcel);

    /// Creates an output on `device` from the tensors that [`pack`](Self::pack) has put into the parcel.
    ///
    /// # Errors
    ///
    /// [`Error::Parcel`], from [`Parcel::take`].
    fn unpack(parcel: &mut Parcel, device: &Device) -> Result<Self, Error>;
}

/// Tensors by name, in transit from one process to another. Their types and bits stay unchanged.
#[derive(Debug, Default)]
pub struct Parcel {
    tensors: BTreeMap<String, TensorData>,
    /// The name of a tensor that was put in twice.
    twice: Option<String>,
}

impl Parcel {
    /// Returns an empty parcel.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a tensor in. A second one with the same name is rejected when the parcel is sent.
    pub fn put<const D: usize, K: Basic>(&mut self, name: &str, tensor: Tensor<D, K>) {
        match self.tensors.entry(name.to_owned()) {
            Entry::Vacant(place) => {
                place.insert(tensor.into_data());
            }
            Entry::Occupied(_) => self.twice = Some(name.to_owned()),
        }
    }

    /// Takes a tensor out, on `device`.
    ///
    /// # Errors
    ///
    /// [`Error::Parcel`] if there is none with this name, or one with a different number of dims.
    pub fn take<const D: usize, K: Basic>(
        &mut self,
        name: &str,
        device: &Device,
    ) -> Result<Tensor<D, K>, Error> {
        let Some(data) = self.tensors.remove(name) else {
            return Err(unfit(name, "is missing, or was taken before".to_owned()));
        };
        let dims = data.shape().num_dims();
        if dims != D {
            let reason = format!("has {dims} dims, but was requested with {D}");
            return Err(unfit(name, reason));
        }
        let dtype = data.dtype();
        Ok(Tensor::from_data(data, (device, dtype)))
    }

    /// Returns true if a tensor of this name can be taken out.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the tensors, and additional numbers, as bytes.
    pub(crate) fn into_bytes(self, numbers: &[(&str, u64)]) -> Result<Bytes, Error> {
        if let Some(name) = &self.twice {
            return Err(unfit(name, "was added twice".to_owned()));
        }
        let tensors = self.tensors.into_iter().map(|(name, data)| {
            let (dtype, shape) = (data.dtype(), data.shape().clone());
            PackedTensor::new(name, dtype, shape, None, data.into_bytes())
        });
        let mut writer = Writer::new(tensors.collect());
        for (name, number) in numbers {
            writer = writer.with_scalar(name, Scalar::UInt(*number));
        }
        writer.into_bytes().map_err(unreadable)
    }

    /// Reads the result of [`into_bytes`](Self::into_bytes): the parcel, and the numbers by name.
    pub(crate) fn of_bytes(bytes: Bytes) -> Result<(Self, BTreeMap<String, u64>), Error> {
        let reader = Reader::from_bytes(bytes).map_err(unreadable)?;
        let numbers = reader.scalars().iter().filter_map(|(name, number)| {
            let number = match number {
                Scalar::UInt(number) => Some(*number),
                Scalar::Int(number) => u64::try_from(*number).ok(),
                Scalar::Float(_) | Scalar::Bool(_) => None,
            };
            Some((name.clone(), number?))
        });
        let numbers = numbers.collect();
        let mut parcel = Self::new();
        for tensor in reader.into_tensors().map_err(unreadable)? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(unreadable)?;
            let data = TensorData::from_bytes(bytes, shape, dtype);
            parcel.tensors.insert(name, data);
        }
        Ok((parcel, numbers))
    }
}

fn unfit(name: &str, reason: String) -> Error {
    Error::Parcel {
        name: name.to_owned(),
        reason,
    }
}

/// Returns the error for bytes that are not a parcel.
fn unreadable(error: burn_pack::Error) -> Error {
    Error::Parcel {
        name: "all".to_owned(),
        reason: error.to_string(),
    }
}

/// Implements [`Portable`] for outputs with a loss, scores and targets.
macro_rules! portable {
    ($($output:ty)+) => {$(
        impl Portable for $output {
            fn pack(self, parcel: &mut Parcel) {
                parcel.put("loss", self.loss);
                parcel.put("output", self.output);
                parcel.put("targets", self.targets);
            }

            fn unpack(parcel: &mut Parcel, device: &Device) -> Result<Self, Error> {
                Ok(Self {
                    loss: parcel.take("loss", device)?,
                    output: parcel.take("output", device)?,
                    targets: parcel.take("targets", device)?,
                })
            }
        }
    )+};
}

portable!(ClassificationOutput MultiLabelClassificationOutput RegressionOutput);

impl Portable for SequenceOutput {
    fn pack(self, parcel: &mut Parcel) {
        parcel.put("loss", self.loss);
        parcel.put("logits", self.logits);
        parcel.put("targets", self.targets);
        if let Some(predictions) = self.predictions {
            parcel.put("predictions", predictions);
        }
    }

    fn unpack(parcel: &mut Parcel, device: &Device) -> Result<Self, Error> {
        let predictions = parcel.has("predictions");
        Ok(Self {
            loss: parcel.take("loss", device)?,
            logits: parcel.take("logits", device)?,
            targets: parcel.take("targets", device)?,
            predictions: predictions
                .then(|| parcel.take("predictions", device))
                .transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, FloatDType, Int};

    use super::*;

    /// Encodes an output as bytes, and returns the output decoded from them.
    fn through<O: Portable>(output: O) -> O {
        let mut parcel = Parcel::new();
        output.pack(&mut parcel);
        let bytes = parcel.into_bytes(&[("number", 7)]).expect("it was packed");
        let (mut parcel, numbers) = Parcel::of_bytes(bytes).expect("it was written");
        assert_eq!(numbers["number"], 7);
        let output = O::unpack(&mut parcel, &Device::flex());
        output.unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn burn_outputs_round_trip() {
        let device = Device::flex().autodiff();
        let loss = || Tensor::<1>::from_floats([f32::NAN], &device).require_grad();
        let scores = || Tensor::<2>::from_floats([[1.0, -0.0, f32::INFINITY]], &device);
        let classes = || Tensor::<1, Int>::from_ints([2], &device);
        let labels = || Tensor::<2, Int>::from_ints([[0, 1, 1]], &device);
        let got = through(ClassificationOutput::new(loss(), scores(), classes()));
        assert!(got.loss.into_scalar::<f32>().is_nan());
        assert_eq!(got.output.into_data(), scores().into_data());
        assert_eq!(got.targets.into_data(), classes().into_data());
        let output = MultiLabelClassificationOutput::new(loss(), scores(), labels());
        assert_eq!(through(output).targets.into_data(), labels().into_data());
        let output = RegressionOutput::new(loss(), scores(), scores());
        assert_eq!(through(output).targets.into_data(), scores().into_data());
        let logits = || Tensor::<3>::ones([1, 3, 5], &device).cast(FloatDType::BF16);
        for predictions in [None, Some(labels())] {
            let sequences = SequenceOutput::new(loss(), logits(), predictions.clone(), labels());
            let got = through(sequences);
            assert_eq!(got.logits.into_data(), logits().into_data());
            let data = |tensor: Tensor<2, Int>| tensor.into_data();
            assert_eq!(got.predictions.map(data), predictions.map(data));
        }
    }

    /// An output with a boolean tensor, packed twice if the flag is set.
    struct Masked(Tensor<2, Bool>, bool);

    impl Portable for Masked {
        fn pack(self, parcel: &mut Parcel) {
            if self.1 {
                parcel.put("mask", self.0.clone());
            }
            parcel.put("mask", self.0);
        }

        fn unpack(parcel: &mut Parcel, device: &Device) -> Result<Self, Error> {
            Ok(Self(parcel.take("mask", device)?, false))
        }
    }

    #[test]
    fn unsupported_outputs_are_named_in_the_error() {
        let device = Device::flex();
        let mask = || Tensor::<2, Bool>::full([1, 2], true, &device);
        assert_eq!(
            through(Masked(mask(), false)).0.into_data(),
            mask().into_data()
        );
        let refused = |error: Error| match error {
            Error::Parcel { name, reason } => (name, reason),
            other => panic!("{other}"),
        };
        let mut parcel = Parcel::new();
        Masked(mask(), true).pack(&mut parcel);
        let (name, reason) = refused(parcel.into_bytes(&[]).expect_err("it is in it twice"));
        assert!(name == "mask" && reason.contains("twice"), "{reason}");
        let mut parcel = Parcel::new();
        Masked(mask(), false).pack(&mut parcel);
        let none = parcel.take::<1, Bool>("loss", &device);
        let (name, reason) = refused(none.expect_err("it is not in it"));
        assert!(name == "loss" && reason.contains("is missing"), "{reason}");
        let other = parcel.take::<1, Bool>("mask", &device);
        let (name, reason) = refused(other.expect_err("it is of two dims"));
        assert!(name == "mask" && reason.contains("2 dims"), "{reason}");
        assert!(!parcel.has("mask"));
        let bytes = Bytes::from_bytes_vec(vec![1, 2, 3]);
        assert!(Parcel::of_bytes(bytes).is_err());
    }
}
