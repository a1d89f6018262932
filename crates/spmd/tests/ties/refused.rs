//! Fields that share an id but cannot be one parameter.

use burn::module::{Param, ParamGroup};
use burn::optim::SgdConfig;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_fsdp_mesh::Region;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Error, Mode, OptimizerGroups, Precision, ShardSpec, compile, compile_from};

use super::Tied;

fn assert_tied(error: &Error, second: &str, reason: &str) {
    assert!(matches!(error, Error::Tied { .. }), "{error}");
    let text = error.to_string();
    let names = format!("`embed.weight` and `{second}`");
    assert!(text.contains(&names) && text.contains(reason), "{text}");
}

fn refused(change: fn(Tied) -> Tied, options: Options) -> Error {
    let init = move |device: &Device| change(Tied::new(device));
    let mode = Mode::single().options(options);
    let step = compile(init, Tied::loss, SgdConfig::new().build(), mode);
    step.expect_err("refused")
}

#[test]
fn values_and_shapes_must_be_equal() {
    let error = refused(
        |mut model| {
            let other = |value: Tensor<2>| (value.inner() + 1.0).autodiff().require_grad();
            model.head.weight = model.head.weight.init_mapper(other);
            model
        },
        Options::default(),
    );
    assert_tied(&error, "head.weight", "different values");
    let error = refused(
        |mut model| {
            let (id, device) = (model.embed.weight.id, model.embed.weight.lazy_device());
            let other = Tensor::<2>::zeros([2, 3], &device).require_grad();
            model.middle.weight = Param::initialized(id, other);
            model
        },
        Options::default(),
    );
    assert_tied(&error, "middle.weight", "different shapes");
}

#[test]
fn groups_and_types_must_treat_tied_fields_equally() {
    let precision = Precision::new(FloatDType::BF16).full_in(["head"]);
    let error = refused(|model| model, Options::default().precision(precision));
    assert_tied(&error, "head.weight", "different types");
    let groups = OptimizerGroups::from(SgdConfig::new().build()).with_group(
        ParamGroup::from_predicate("middle"),
        SgdConfig::new().build(),
    );
    let step = compile(Tied::new, Tied::loss, groups, Mode::single());
    assert_tied(
        &step.expect_err("refused"),
        "middle.weight",
        "name the first",
    );
}

#[test]
fn values_read_for_tied_fields_must_be_equal() {
    let read = |shard: &ShardSpec<'_>| {
        let len: usize = shard.shape.iter().product();
        let by = if &*shard.whole.path == "head.weight" {
            1.0
        } else {
            0.0
        };
        assert!(matches!(shard.region, Region::Flat(_) | Region::Box { .. }));
        let is_table = shard.whole.path.ends_with("d.weight");
        let values = vec![by; len];
        Ok::<_, Error>(is_table.then(|| TensorData::new(values, shard.shape.clone())))
    };
    let loss = |model: &Tied, words: Tensor<2, Int>| model.loss(words);
    let step = compile_from(
        Tied::new,
        read,
        loss,
        SgdConfig::new().build(),
        Mode::single(),
    );
    assert_tied(
        &step.expect_err("refused"),
        "head.weight",
        "the values read",
    );
}
