//! A record of a sharded module is a record of the module.

use burn::module::Module;
use burn::nn::LinearConfig;
use burn_fsdp_shard::{ShardPolicy, backward, catch};

use super::bench::{
    build, device, on_ranks, optimizer, panic_of, params, ready, seeded, whole_params,
};
use super::nets::{MLP, Mlp};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn plain(seed: u64) -> Mlp {
    ready(|| seeded((MLP.build)(&device()), seed))
}

#[test]
fn a_full_record_loads_into_a_sharded_module() {
    for ranks in 1..=4 {
        let source = plain(99);
        let want = params(&source);
        let record = source.into_record().into_bytes().expect("in memory");
        let record: Vec<u8> = record.to_vec();
        for got in on_ranks(ranks, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, blocks())?;
            let bytes = burn::tensor::Bytes::from_bytes_vec(record.clone());
            let record = burn::store::ModuleRecord::from_bytes(bytes).expect("well formed");
            let model = model.load_record(record);
            let loss = model.loss(world.rank(), 0, &device);
            let gradients = backward(loss, &model)?;
            assert!(!gradients.is_empty(), "still trainable");
            Ok(whole_params((MLP.build)(&device), &model))
        }) {
            assert_eq!(got, want);
        }
    }
}

#[test]
fn a_sharded_record_loads_at_another_number_of_ranks() {
    let trained = |ranks: usize| {
        on_ranks(ranks, move |world| {
            let device = device();
            let mut model = build(MLP, &world, &device, blocks())?;
            let mut optim = optimizer();
            let loss = model.loss(0, 0, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
            let bytes = model.into_record().into_bytes().expect("in memory");
            Ok(bytes.to_vec())
        })
        .swap_remove(0)
    };
    let record = trained(3);
    let loaded = on_ranks(2, move |world| {
        let device = device();
        let bytes = burn::tensor::Bytes::from_bytes_vec(record.clone());
        let record = burn::store::ModuleRecord::from_bytes(bytes).expect("well formed");
        let want = params(&(MLP.build)(&device).load_record(record.clone()));
        let model = build(MLP, &world, &device, blocks())?.load_record(record);
        Ok((whole_params((MLP.build)(&device), &model), want))
    });
    for (got, want) in loaded {
        assert_eq!(got, want);
    }
}

#[test]
fn a_record_of_two_different_copies_is_refused() {
    let messages = on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let loss = model.loss(world.rank(), 0, &device);
        let gradients = backward(loss, &model)?;
        let stepped = optimizer().step(1e-2, model.clone(), gradients);
        let error = catch(|| stepped.clone().into_record()).expect_err("two copies");
        drop(model);
        catch(|| stepped.into_record())?;
        Ok(error.to_string())
    });
    assert!(messages[0].contains("2 live copies"), "{}", messages[0]);
}

#[test]
fn a_record_of_another_shape_is_refused_by_path_and_shapes() {
    let other = || {
        let mut model = plain(3);
        model.blocks[1].up = ready(|| LinearConfig::new(15, 9).init(&device()));
        model
    };
    let record = other()
        .into_record()
        .into_bytes()
        .expect("in memory")
        .to_vec();
    // Burn's own message, as for the plain module: it shows the shape that sharding hides.
    let message = panic_of(|| {
        on_ranks(2, move |world| {
            let model = build(MLP, &world, &device(), blocks())?;
            let bytes = burn::tensor::Bytes::from_bytes_vec(record.clone());
            let record = burn::store::ModuleRecord::from_bytes(bytes).expect("well formed");
            let _ = model.load_record(record);
            Ok(())
        })
    });
    assert!(
        message.contains("blocks.1.up.weight: shape mismatch"),
        "{message}"
    );
    assert!(message.contains("[15, 7]"), "{message}");
    assert!(message.contains("[15, 9]"), "{message}");
}
