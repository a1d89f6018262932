//! Fields of one id that cannot be one parameter.

use burn::module::{Lora, Param};
use burn::tensor::FloatDType;
use burn_fsdp_shard::{Cut, Error, Precision, ShardPolicy, fully_shard};

use super::bench::{device, on_ranks};
use super::model::{Net, Tied, mesh};

fn refused(change: fn(Tied) -> Tied, policy: ShardPolicy, says: &'static str) {
    on_ranks(1, move |world| {
        let model = change(Tied::of_rank(0, &device()));
        let error = fully_shard(model, &mesh(&world, 1)?, policy.clone());
        let error = error.expect_err("refused");
        assert!(matches!(error, Error::Tied { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("`embed.weight`") && text.contains(says),
            "{text}"
        );
        Ok(())
    });
}

#[test]
fn values_shapes_and_training_must_be_equal() {
    let policy = ShardPolicy::new;
    refused(
        |mut model| {
            let other =
                |value: burn::tensor::Tensor<2>| (value.inner() + 1.0).autodiff().require_grad();
            model.head.weight = model.head.weight.map(other);
            model
        },
        policy(),
        "different values",
    );
    refused(
        |mut model| {
            let id = model.embed.weight.id;
            let transposed = model.head.weight.val().inner().transpose().autodiff();
            model.head.weight = Param::initialized(id, transposed.require_grad());
            model
        },
        policy(),
        "differ in shape",
    );
    refused(
        |mut model| {
            model.head.weight = model.head.weight.set_require_grad(false);
            model
        },
        policy(),
        "one is frozen",
    );
}

#[test]
fn policies_must_treat_tied_fields_equally() {
    let policy = ShardPolicy::new;
    let same = |model| model;
    for ignored in ["embed", "head"] {
        refused(same, policy().ignore([ignored]), "the policy ignores");
    }
    refused(
        same,
        policy().ignore(["embed", "middle", "head"]),
        "the policy ignores",
    );
    let precision = Precision::new(FloatDType::BF16).full_in(["head"]);
    refused(same, policy().precision(precision), "different types");
    refused(same, policy().cut_of(["head"], Cut::Dims), "name the first");
    refused(same, policy().one_owner(["middle"]), "name the first");
    refused(same, policy().lora(Lora::new(2, 4.0)), "LoRA");
}

/// One of them was sharded by an earlier call, with any policy.
#[test]
fn sharding_tied_fields_in_separate_calls_is_rejected() {
    on_ranks(1, |world| {
        let mesh = mesh(&world, 1)?;
        let mut model = Tied::of_rank(0, &device());
        model.head = fully_shard(model.head, &mesh, ShardPolicy::new())?;
        let error = fully_shard(model, &mesh, ShardPolicy::new()).err();
        let text = error.expect("refused").to_string();
        assert!(text.contains("`head.weight` and `embed.weight`"), "{text}");
        assert!(text.contains("in one call"), "{text}");
        Ok(())
    });
}

/// Frozen values do not drift apart, whichever ranks have them.
#[test]
fn frozen_fields_may_be_ignored_together() {
    on_ranks(2, |world| {
        let mut model = Tied::of_rank(0, &device());
        let frozen = model.embed.weight.set_require_grad(false);
        model.middle.weight = frozen.clone();
        model.head.weight = frozen.clone();
        model.embed.weight = frozen;
        let policy = ShardPolicy::new().ignore(["embed", "middle", "head"]);
        let model = fully_shard(model, &mesh(&world, 1)?, policy)?;
        let [one, other] = [&model.embed.weight, &model.head.weight];
        assert_eq!(one.val().into_data(), other.val().into_data());
        Ok(())
    });
}
