//! Outputs of steps as tensors that travel from one process to another.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use burn::tensor::kind::Basic;
use burn::tensor::{Bytes, Device, Tensor, TensorData};
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use burn_pack::{Reader, Scalar, Tensor as PackedTensor, Writer};

use crate::error::Error;

/// What a step gives to the metrics of Burn's loop, as tensors: so it travels to rank 0 where ranks are processes.
///
/// Burn's outputs of classification, regression and sequences are. Of one's own, whatever the metrics read has to be
/// packed:
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::Error;
/// use burn_fsdp::train::{Parcel, Portable};
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
///     fn unpack(parcel: &mut Parcel) -> Result<Self, Error> {
///         let (loss, picture) = (parcel.take("loss")?, parcel.take("picture")?);
///         Ok(Self { loss, picture })
///     }
/// }
///
/// let device = Device::flex();
/// let mut parcel = Parcel::new(&device);
/// let (loss, picture) = (Tensor::ones([1], &device), Tensor::ones([1, 3, 2, 2], &device));
/// Reconstruction { loss, picture }.pack(&mut parcel);
/// assert_eq!(Reconstruction::unpack(&mut parcel)?.picture.dims(), [1, 3, 2, 2]);
/// # Ok::<(), Error>(())
/// ```
pub trait Portable: Sized {
    /// Puts the tensors into a parcel, each under a name of its own.
    fn pack(self, parcel: &mut Parcel);

    /// Puts an output together from what [`pack`](Self::pack) has put into the parcel.
    ///
    /// # Errors
    ///
    /// [`Error::Parcel`], from [`Parcel::take`].
    fn unpack(parcel: &mut Parcel) -> Result<Self, Error>;
}

/// Tensors by name, on their way from one process to another. Their types and bits stay as they are.
#[derive(Debug)]
pub struct Parcel {
    device: Device,
    tensors: BTreeMap<String, TensorData>,
    /// A name under which two tensors were put.
    twice: Option<String>,
}

impl Parcel {
    /// Returns a parcel with nothing in it, whose tensors are taken out on `device`.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            tensors: BTreeMap::new(),
            twice: None,
        }
    }

    /// Puts a tensor in. A second one of the same name is refused when the parcel is sent.
    pub fn put<const D: usize, K: Basic>(&mut self, name: &str, tensor: Tensor<D, K>) {
        match self.tensors.entry(name.to_owned()) {
            Entry::Vacant(place) => {
                place.insert(tensor.into_data());
            }
            Entry::Occupied(_) => self.twice = Some(name.to_owned()),
        }
    }

    /// Takes a tensor out.
    ///
    /// # Errors
    ///
    /// [`Error::Parcel`] if there is none of this name, or one with another number of dims.
    pub fn take<const D: usize, K: Basic>(&mut self, name: &str) -> Result<Tensor<D, K>, Error> {
        let Some(data) = self.tensors.remove(name) else {
            return Err(self.error(name, "is not in it, or was taken before".to_owned()));
        };
        let dims = data.shape().num_dims();
        if dims != D {
            let reason = format!("has {dims} dims and is taken out with {D}");
            return Err(self.error(name, reason));
        }
        let dtype = data.dtype();
        Ok(Tensor::from_data(data, (&self.device, dtype)))
    }

    /// Returns true if a tensor of this name can be taken out.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the tensors, and numbers beside them, as bytes.
    pub(crate) fn into_bytes(self, numbers: &[(&str, u64)]) -> Result<Bytes, Error> {
        if let Some(name) = &self.twice {
            return Err(self.error(name, "was put in twice".to_owned()));
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

    /// Reads what [`into_bytes`](Self::into_bytes) has written: the parcel, and the numbers by name.
    pub(crate) fn of_bytes(
        bytes: Bytes,
        device: &Device,
    ) -> Result<(Self, BTreeMap<String, u64>), Error> {
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
        let mut parcel = Self::new(device);
        for tensor in reader.into_tensors().map_err(unreadable)? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(unreadable)?;
            let data = TensorData::from_bytes(bytes, shape, dtype);
            parcel.tensors.insert(name, data);
        }
        Ok((parcel, numbers))
    }

    fn error(&self, name: &str, reason: String) -> Error {
        Error::Parcel {
            name: name.to_owned(),
            reason,
        }
    }
}

/// Returns the error for bytes that are no parcel.
fn unreadable(error: burn_pack::Error) -> Error {
    Error::Parcel {
        name: "all".to_owned(),
        reason: error.to_string(),
    }
}

impl Portable for ClassificationOutput {
    fn pack(self, parcel: &mut Parcel) {
        parcel.put("loss", self.loss);
        parcel.put("output", self.output);
        parcel.put("targets", self.targets);
    }

    fn unpack(parcel: &mut Parcel) -> Result<Self, Error> {
        Ok(Self {
            loss: parcel.take("loss")?,
            output: parcel.take("output")?,
            targets: parcel.take("targets")?,
        })
    }
}

impl Portable for MultiLabelClassificationOutput {
    fn pack(self, parcel: &mut Parcel) {
        parcel.put("loss", self.loss);
        parcel.put("output", self.output);
        parcel.put("targets", self.targets);
    }

    fn unpack(parcel: &mut Parcel) -> Result<Self, Error> {
        Ok(Self {
            loss: parcel.take("loss")?,
            output: parcel.take("output")?,
            targets: parcel.take("targets")?,
        })
    }
}

impl Portable for RegressionOutput {
    fn pack(self, parcel: &mut Parcel) {
        parcel.put("loss", self.loss);
        parcel.put("output", self.output);
        parcel.put("targets", self.targets);
    }

    fn unpack(parcel: &mut Parcel) -> Result<Self, Error> {
        Ok(Self {
            loss: parcel.take("loss")?,
            output: parcel.take("output")?,
            targets: parcel.take("targets")?,
        })
    }
}

impl Portable for SequenceOutput {
    fn pack(self, parcel: &mut Parcel) {
        parcel.put("loss", self.loss);
        parcel.put("logits", self.logits);
        parcel.put("targets", self.targets);
        if let Some(predictions) = self.predictions {
            parcel.put("predictions", predictions);
        }
    }

    fn unpack(parcel: &mut Parcel) -> Result<Self, Error> {
        let predictions = parcel.has("predictions");
        Ok(Self {
            loss: parcel.take("loss")?,
            logits: parcel.take("logits")?,
            targets: parcel.take("targets")?,
            predictions: predictions
                .then(|| parcel.take("predictions"))
                .transpose()?,
        })
    }
}
