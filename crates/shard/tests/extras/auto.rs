//! Units by size, and names.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use burn_fsdp_shard::{Error, ShardPolicy, auto_units, check_names, parameter_paths, wrap_plan};

use super::bench::{assert_close, build, device, on_ranks, plainly, sharded};
use super::nets::{MLP, Mlp};

#[derive(Module, Debug)]
struct Uneven {
    large: Linear,
    pair: (Linear, Linear),
    nested: Vec<Vec<Linear>>,
    few: Few,
}

#[derive(Module, Debug)]
struct Few {
    one: Linear,
    other: Linear,
}

fn linear(side: usize, device: &Device) -> Linear {
    LinearConfig::new(side, side).with_bias(false).init(device)
}

fn uneven(device: &Device) -> Uneven {
    Uneven {
        large: linear(20, device),
        pair: (linear(5, device), linear(10, device)),
        nested: vec![vec![linear(10, device), linear(3, device)]],
        few: Few {
            one: linear(8, device),
            other: linear(7, device),
        },
    }
}

#[test]
fn the_innermost_large_enough_modules_are_proposed_and_never_containers() {
    let module = uneven(&device());
    // 400, (25, 100), [[100, 9]], 64 + 49 = 113.
    assert_eq!(
        auto_units(&module, 100),
        ["large", "pair.1", "nested.0.0", "few"]
    );
    assert_eq!(auto_units(&module, 114), ["large"]);
    assert_eq!(
        auto_units(&module, 60),
        ["large", "pair.1", "nested.0.0", "few.one"],
        "what is left of `few` is too small"
    );
    assert_eq!(auto_units(&module, 1_000), [""; 0]);
    assert_eq!(auto_units(&module, 0).len(), 7, "every layer");
}

#[test]
fn a_module_trains_with_the_units_proposed() {
    let units = || auto_units(&Mlp::new(&device()), 300);
    assert_eq!(units(), ["blocks.0", "blocks.1", "blocks.2"]);
    for ranks in 1..=3 {
        let policy = ShardPolicy::new().units(units());
        assert_close(
            &sharded(MLP, ranks, 5, policy),
            &plainly(MLP, ranks, 5),
            1e-5,
        );
    }
}

#[test]
fn sharding_keeps_names_and_sizes() {
    on_ranks(2, |world| {
        let device = device();
        let before = parameter_paths(&Mlp::new(&device));
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let model = build(MLP, &world, &device, policy)?;
        assert_eq!(parameter_paths(&model), before);
        check_names(&before, &model)?;
        assert_eq!(
            auto_units(&model, 300).len(),
            wrap_plan(&model)?.units.len() - 1
        );
        Ok(())
    });
}

#[test]
fn a_lost_name_is_reported_with_its_place() {
    let module = Mlp::new(&device());
    let mut names = parameter_paths(&module);
    assert!(check_names(&names, &module).is_ok());
    names[2] = "blocks.0.scale".to_owned();
    let error = check_names(&names, &module).expect_err("another name");
    let message = error.to_string();
    assert!(
        message.contains("number 2 was `blocks.0.scale`"),
        "{message}"
    );
    assert!(message.contains("`blocks.0.norm.beta`"), "{message}");
    names[2] = "blocks.0.norm.beta".to_owned();
    names.push("tail".to_owned());
    let error = check_names(&names, &module).expect_err("one too many");
    assert!(
        matches!(&error, Error::Names { got, .. } if got == "nothing"),
        "{error}"
    );
}
