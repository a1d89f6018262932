//! Replicas of a sharded model, in Burn's own loop.

use burn_fsdp::internals::state::local_state;
use burn_fsdp::train::FullySharded;
use burn_fsdp::{LaunchConfig, ShardPolicy, fully_shard, resume, save};

use super::network::{BATCH, Net, items};
use super::runs::logged;
use super::{assert_close, by, device, folder, on, optimizer, plain, rates, sharded, training};

#[test]
fn replicas_match_one_device() {
    for (ranks, replicas, trained, validated) in
        [(2, 2, 16, 8), (4, 2, 33, 3), (3, 3, 26, 5), (4, 1, 20, 6)]
    {
        let data = (items(trained, 1), items(validated, 2));
        let (ours, burns) = (folder(), folder());
        let strategy = on(ranks).replicas(replicas);
        let result = by(
            &strategy,
            Net::new(&device()),
            ours.path(),
            data.clone(),
            |it| it,
        );
        let result = result.unwrap_or_else(|error| panic!("{error}"));
        assert!(result.error.is_none() && result.interrupted.is_none());
        let expected = plain(burns.path(), data, ranks, |training| training);
        assert_close(&result.model, &expected.model, 1e-5);
        for split in ["train", "valid"] {
            let (got, counted) = logged(ours.path(), split, 3, "Accuracy");
            let (expected, all) = logged(burns.path(), split, 3, "Accuracy");
            assert_eq!(counted, all, "{ranks} ranks, {split}");
            assert!((got - expected).abs() < 1e-3, "{split}: {got}, {expected}");
        }
    }
}

#[test]
fn each_replica_holds_the_model_in_shards() {
    let data = (items(8, 1), items(4, 2));
    let at = folder();
    let shards = on(4).replicas(2).launch_sharded(
        training(at.path(), data, BATCH),
        Net::new(&device()),
        optimizer(),
        rates(),
        |_, model, _| {
            let mut local = local_state(&model)?.into_iter();
            let hidden = local.find(|tensor| tensor.path == "hidden.weight");
            Ok(hidden.expect("named").range())
        },
    );
    let shards = shards.unwrap_or_else(|error| panic!("{error}")).model;
    assert_eq!(shards, [0..168, 168..336, 0..168, 168..336]);
}

/// Each rank's shards can be saved over the mesh that it gets. A group of all ranks is another mesh.
#[test]
fn replicas_save_over_their_mesh() {
    for replicas in [1, 2] {
        let (at, steps) = (folder(), folder());
        let steps_at = steps.path().to_owned();
        let trained = on(4).replicas(replicas).launch_sharded(
            training(at.path(), (items(8, 1), items(4, 2)), BATCH),
            Net::new(&device()),
            optimizer(),
            rates(),
            move |mesh, model, optimizer| {
                let wrong = save(&steps_at, 2, &model, &optimizer, mesh.world());
                assert_eq!(wrong.is_ok(), replicas == 1);
                if let Err(error) = wrong {
                    let error = error.to_string();
                    let words =
                        "sharded over 2 ranks, but the axis `shard` of the given mesh has 4";
                    assert!(error.contains(words), "{error}");
                }
                let blank = Net::new(&device()).with_other_values();
                save(&steps_at, 3, &model, &optimizer, mesh)?;
                let blank = fully_shard(blank, mesh, policy(replicas))?;
                let resumed = resume(&steps_at, blank, super::optimizer(), mesh)?;
                assert_eq!(resumed.step, 3);
                assert_eq!(parts(&resumed.model), parts(&model));
                Ok(())
            },
        );
        trained.unwrap_or_else(|error| panic!("{error}"));
    }
}

fn policy(replicas: usize) -> ShardPolicy {
    let policy = ShardPolicy::new().units(["conv", "hidden"]);
    if replicas > 1 {
        policy.replicate_axis("replicate")
    } else {
        policy
    }
}

/// This rank's part of each tensor.
fn parts(model: &Net) -> Vec<Vec<u8>> {
    let local = local_state(model).expect("a sharded model");
    local
        .iter()
        .map(|tensor| tensor.elements.as_bytes().to_vec())
        .collect()
}

/// Checkpoints are those of one device: they move between meshes.
#[test]
fn a_checkpoint_moves_between_meshes() {
    let data = || (items(20, 1), items(6, 2));
    let expected = folder();
    let expected = plain(expected.path(), data(), 4, |training| training);
    let from_replicas = folder();
    let two_by_two = on(4).replicas(2);
    let model = || Net::new(&device());
    let first = by(
        &two_by_two,
        model(),
        from_replicas.path(),
        data(),
        |training| training.with_default_checkpointers().num_epochs(2),
    );
    first.unwrap_or_else(|error| panic!("{error}"));
    let resumed = sharded(from_replicas.path(), data(), 4, |training| {
        training.with_default_checkpointers().checkpoint(2)
    });
    let resumed = resumed.unwrap_or_else(|error| panic!("{error}"));
    assert_close(&resumed.model, &expected.model, 1e-5);
    let from_one = folder();
    plain(from_one.path(), data(), 4, |training| {
        training.with_default_checkpointers().num_epochs(1)
    });
    let resumed = by(&two_by_two, model(), from_one.path(), data(), |training| {
        training.with_default_checkpointers().checkpoint(1)
    });
    let resumed = resumed.unwrap_or_else(|error| panic!("{error}"));
    assert_close(&resumed.model, &expected.model, 1e-5);
}

#[test]
fn ranks_that_do_not_divide_into_replicas_are_refused() {
    for (ranks, replicas) in [(3, 2), (4, 3), (2, 0), (2, 4)] {
        let strategy = FullySharded::new(LaunchConfig::new(ranks)).replicas(replicas);
        let at = folder();
        let data = (items(8, 1), items(4, 2));
        let refused = by(&strategy, Net::new(&device()), at.path(), data, |it| it);
        let refused = refused.err().expect("refused").to_string();
        let words =
            format!("`FullySharded::replicas({replicas})` does not divide the {ranks} ranks");
        assert!(refused.contains(&words), "{refused}");
    }
}
