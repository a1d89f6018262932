//! Running states: each rank's own, rank 0's, or the mean.

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp_collectives::{CommCounter, OperationKind};
use burn_fsdp_shard::{BufferSync, ShardPolicy, backward, into_record, sync_buffers};

use super::bench::{build, device, on_ranks, optimizer};
use super::nets::{CONV_NET, ConvNet, MLP};

fn convs() -> ShardPolicy {
    ShardPolicy::new().units(["convs.*"])
}

fn running(model: &ConvNet) -> Vec<f32> {
    let mut all = Vec::new();
    for norm in &model.norms {
        for state in [&norm.running_mean, &norm.running_var] {
            let values = state.value_sync().into_data().try_to_vec::<f32>();
            all.extend(values.expect("f32"));
        }
    }
    all
}

fn train(model: ConvNet, rank: usize, device: &Device) -> Result<ConvNet, burn_fsdp_shard::Error> {
    let mut optim = optimizer();
    let mut model = model;
    for step in 0..3 {
        let gradients = backward((CONV_NET.loss)(&model, rank, step, device), &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    Ok(model)
}

/// Running states before and after, by rank, and the operations between.
fn synced(ranks: usize, sync: BufferSync) -> Vec<(Vec<f32>, Vec<f32>)> {
    on_ranks(ranks, move |world| {
        let device = device();
        let model = build(CONV_NET, &world, &device, convs())?;
        let model = train(model, world.rank(), &device)?;
        let counter = CommCounter::new([&world]);
        // This comes before any other access: the last update counts.
        let model = sync_buffers(model, sync)?;
        match sync {
            BufferSync::Local => counter.expect(&[]),
            BufferSync::Broadcast => counter.expect(&[(OperationKind::Broadcast, 1)]),
            BufferSync::Average => counter.expect(&[(OperationKind::AllReduce, 1)]),
        }
        let after = running(&model);
        // Training continues, with all ranks on the same copy.
        let again = build(CONV_NET, &world, &device, convs())?;
        let before = running(&train(again, world.rank(), &device)?);
        train(model, world.rank(), &device)?;
        Ok((before, after))
    })
}

#[test]
fn local_leaves_each_rank_its_own() {
    let seen = synced(3, BufferSync::Local);
    for (before, after) in &seen {
        assert_eq!(before, after);
    }
    assert_ne!(seen[0].1, seen[1].1);
}

#[test]
fn broadcast_copies_rank_0s_buffers() {
    for ranks in 1..=4 {
        let seen = synced(ranks, BufferSync::Broadcast);
        for (_, after) in &seen {
            assert_eq!(after, &seen[0].0);
        }
    }
}

#[test]
fn average_gives_all_ranks_the_mean() {
    for ranks in 1..=4 {
        let seen = synced(ranks, BufferSync::Average);
        for (index, got) in seen[0].1.iter().enumerate() {
            let sum: f32 = seen.iter().map(|(before, _)| before[index]).sum();
            let want = sum / ranks as f32;
            assert!(
                (got - want).abs() <= 1e-6 * want.abs().max(1e-3),
                "{got}, {want}"
            );
        }
        for (_, after) in &seen {
            assert_eq!(after, &seen[0].1);
        }
    }
}

#[test]
fn a_module_without_running_states_communicates_nothing() {
    on_ranks(2, |world| {
        let model = build(MLP, &world, &device(), ShardPolicy::new())?;
        let counter = CommCounter::new([&world]);
        sync_buffers(model, BufferSync::Broadcast)?;
        counter.expect(&[]);
        let plain = sync_buffers(ConvNet::new(&device()), BufferSync::Average);
        let error = plain.expect_err("plain");
        assert!(error.to_string().contains("fully_shard"), "{error}");
        Ok(())
    });
}

#[test]
fn records_contain_the_last_update() {
    for ranks in 1..=3 {
        on_ranks(ranks, move |world| {
            let device = device();
            let model = build(CONV_NET, &world, &device, convs())?;
            let model = train(model, world.rank(), &device)?;
            // This comes before any other access.
            let record = into_record(model.clone())?;
            let loaded = ConvNet::new(&device).load_record(record);
            assert_eq!(running(&loaded), running(&model));
            Ok(())
        });
    }
}
