//! Outputs that are packed and unpacked.

use burn::tensor::{Bool, Device, FloatDType, Int, Tensor};
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use burn_fsdp::Error;
use burn_fsdp::train::{Parcel, Portable};

fn through<O: Portable>(output: O) -> O {
    let mut parcel = Parcel::new(&Device::flex());
    output.pack(&mut parcel);
    O::unpack(&mut parcel).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn outputs_of_burn_come_out_as_they_went_in() {
    let device = Device::flex().autodiff();
    let loss = || Tensor::<1>::from_floats([f32::NAN], &device).require_grad();
    let scores = || Tensor::<2>::from_floats([[1.0, -0.0, f32::INFINITY]], &device);
    let classes = || Tensor::<1, Int>::from_ints([2], &device);
    let labels = || Tensor::<2, Int>::from_ints([[0, 1, 1]], &device);
    let got = through(ClassificationOutput::new(loss(), scores(), classes()));
    assert!(got.loss.into_scalar::<f32>().is_nan());
    assert_eq!(got.output.into_data(), scores().into_data());
    assert_eq!(got.targets.into_data(), classes().into_data());
    let got = through(MultiLabelClassificationOutput::new(
        loss(),
        scores(),
        labels(),
    ));
    assert_eq!(got.targets.into_data(), labels().into_data());
    let got = through(RegressionOutput::new(loss(), scores(), scores()));
    assert_eq!(got.targets.into_data(), scores().into_data());
    let logits = || Tensor::<3>::ones([1, 3, 5], &device).cast(FloatDType::BF16);
    for predictions in [None, Some(labels())] {
        let sequences = SequenceOutput::new(loss(), logits(), predictions.clone(), labels());
        let got = through(sequences);
        assert_eq!(got.logits.into_data(), logits().into_data());
        let data = |tensor: Tensor<2, Int>| tensor.into_data();
        assert_eq!(got.predictions.map(data), predictions.map(data));
    }
}

#[test]
fn what_is_not_in_a_parcel_is_refused_by_name() {
    let device = Device::flex();
    let mut parcel = Parcel::new(&device);
    parcel.put("mask", Tensor::<2, Bool>::full([1, 2], true, &device));
    let refused = |error: Error| match error {
        Error::Parcel { name, reason } => (name, reason),
        other => panic!("{other}"),
    };
    let (name, reason) = refused(parcel.take::<1, Bool>("loss").expect_err("not there"));
    assert!(name == "loss" && reason.contains("not in it"), "{reason}");
    let (name, reason) = refused(parcel.take::<1, Bool>("mask").expect_err("of two dims"));
    assert!(name == "mask" && reason.contains("2 dims"), "{reason}");
    assert!(!parcel.has("mask"));
}
