//! Trainings whose ranks keep their shards.

use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::state::local_state;
use burn_fsdp::train::FullySharded;
use burn_fsdp::{LaunchConfig, ShardPolicy, save};

use crate::network::{BATCH, Net, items};
use crate::{device, folder, optimizer, rates, sharded, training, values};

#[test]
fn launch_sharded_returns_the_result_of_each_rank() {
    let data = || (items(20, 1), items(6, 2));
    for ranks in 1..=3 {
        let expected = sharded(folder().path(), data(), ranks, |training| training);
        let expected = expected.unwrap_or_else(|error| panic!("{error}")).model;
        let at = folder();
        let steps = at.path().join("steps");
        let to = steps.clone();
        let policy = ShardPolicy::new().units(["conv", "hidden"]);
        let result = FullySharded::new(LaunchConfig::new(ranks))
            .policy(policy)
            .launch_sharded(
                training(at.path(), data(), BATCH),
                Net::new(&device()),
                optimizer(),
                rates(),
                move |mesh, model, optimizer| {
                    save(&to, 15, &model, &optimizer, mesh)?;
                    let local = local_state(&model)?.into_iter();
                    let held = local.map(|tensor| tensor.range().len()).sum::<usize>();
                    Ok((mesh.world().rank(), held))
                },
            );
        let result = result.unwrap_or_else(|error| panic!("{error}"));
        let numbers = result.model.iter().map(|(rank, _)| *rank);
        assert!(numbers.eq(0..ranks));
        let held: usize = result.model.iter().map(|(_, held)| held).sum();
        let expected = values(&expected);
        let all: usize = expected.iter().map(|(_, values)| values.len()).sum();
        // Every rank holds some small ones whole.
        assert!(
            held >= all && (ranks == 1 || held < 2 * all),
            "{held} of {all}"
        );
        // The trained model, in files that were never whole anywhere.
        let step = Checkpoints::new(&steps).newest().expect("it was saved");
        for (path, values) in expected {
            let region = Region::Flat(0..values.len());
            let bytes = step.read(&path, &region).expect("it has the tensor");
            let (words, _) = bytes.as_chunks::<4>();
            let got: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
            assert_eq!(got, values, "{path} on {ranks} ranks");
        }
        // The optimizer's state is included, so that a custom loop can continue.
        let names = step.index().tensors.iter().map(|tensor| &tensor.name);
        let states = names.filter(|name| name.starts_with("optimizer."));
        assert_eq!(states.count(), 2 * 6);
    }
}
