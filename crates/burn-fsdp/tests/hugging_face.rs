//! Checkpoints in Hugging Face's form, of which each rank reads its shards.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::inspect::{memory, reset_peak};
use burn_fsdp::sharding::Cut;
use burn_fsdp::state::{into_record, load_local_state};
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, Strategy, fully_shard, launch,
};
use burn_fsdp_models::{Architecture, Llama, LlamaConfig, WeightsFile};

const CONFIG: LlamaConfig = LlamaConfig {
    layers: 3,
    dim: 20,
    heads: 2,
    kv_heads: 1,
    hidden: 36,
    vocab: 29,
    seq: 8,
    rope_base: 10_000,
};

fn logits(model: &Llama) -> Vec<f32> {
    let tokens = Tensor::<2, Int>::from_data([[1, 5, 10, 3], [0, 2, 28, 9]], &Device::flex());
    let logits = model.forward(tokens).into_data();
    logits.try_to_vec().expect("floats")
}

/// The model of these ranks, each of which has read its shards, whole again; and the bytes that each has read.
fn loaded(
    folder: &std::path::Path,
    ranks: usize,
    policy: ShardPolicy,
) -> Vec<(Vec<f32>, u64, usize)> {
    let folder = Arc::new(folder.to_owned());
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(30));
    let seen = launch(config, move |world| {
        let weights = WeightsFile::open(folder.as_path(), CONFIG).expect("it fits the model");
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let model = CONFIG.blank(&device).expect("valid sizes");
        let model = fully_shard(model, &mesh, policy.clone())?;
        reset_peak(&model)?;
        let model: Llama = load_local_state(model, |tensor| {
            let values = weights
                .read(&tensor.path, tensor.range())
                .expect("readable");
            Ok::<_, Error>(Some(
                values
                    .iter()
                    .flat_map(|value| value.to_ne_bytes())
                    .collect(),
            ))
        })?;
        let unsharded = memory(&model)?.unsharded_peak;
        let record = into_record(model)?;
        let whole = CONFIG.blank(&Device::flex()).expect("valid sizes");
        let whole = burn::module::Module::load_record(whole, record);
        Ok::<_, Error>((logits(&whole), weights.num_bytes_read(), unsharded))
    });
    seen.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_rank_reads_its_shards_and_nothing_is_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = CONFIG.init(&Device::flex(), 5).expect("valid sizes");
    model
        .save(folder.path().join("model.safetensors"))
        .expect("a writable folder");
    let expected = logits(&model);
    let all_bytes = 4 * CONFIG.num_params() as u64;
    // Vectors are whole on every rank, and rows at the ends of a range may be read twice.
    let twice = 4 * 2 * (CONFIG.layers as u64 * (4 * 20 + 3 * 36) + 29 + 20 * 7);
    let layers = || ShardPolicy::new().units(["layers.*"]);
    for ranks in 1..=4 {
        for policy in [
            layers(),
            layers().cut(Cut::Dims),
            layers().one_owner(["**"]),
            layers().strategy(Strategy::ShardGradOp),
        ] {
            let seen = loaded(folder.path(), ranks, policy);
            for (logits, read, unsharded) in &seen {
                assert_eq!(logits, &expected, "{ranks} ranks");
                assert_eq!(*unsharded, 0);
                assert!(
                    *read < all_bytes * 2 / ranks as u64 + twice,
                    "{read} of {all_bytes}"
                );
            }
            let read: u64 = seen.iter().map(|(_, read, _)| read).sum();
            assert!(
                read >= all_bytes && read <= all_bytes + ranks as u64 * twice,
                "{read} of {all_bytes}"
            );
        }
    }
}
