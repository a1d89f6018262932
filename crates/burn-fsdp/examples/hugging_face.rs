//! A Llama from a folder in Hugging Face's format. Each rank keeps only its shards, and no rank has the whole model.
//!
//! ```text
//! cargo run --release --example hugging_face                    a small one, made at random
//! cargo run --release --example hugging_face -- FOLDER RANKS    `config.json` and safetensors, of one file or several
//! ```
//!
//! It is trained twice: first all of it, then low-rank adapters on frozen shards. Only the adapters are saved.

use std::path::Path;

use burn::module::{Lora, Module, ParamGroup};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::inspect::memory;
use burn_fsdp::state::load_local_state;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward, fully_shard,
    launch,
};
use burn_fsdp_models::{Architecture, Llama, LlamaConfig, WeightsFile};

/// Creates a folder with a small random model.
fn random(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let config = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}"#;
    std::fs::write(folder.join("config.json"), config)?;
    let model = LlamaConfig::from_hugging_face(folder)?.init(&Device::flex(), 1)?;
    Ok(model.save(folder.join("model.safetensors"))?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let made = tempfile::tempdir()?;
    let (folder, ranks) = match arguments.next() {
        Some(folder) => (
            folder.into(),
            arguments.next().unwrap_or("2".to_owned()).parse()?,
        ),
        None => {
            random(made.path())?;
            (made.path().to_owned(), 2)
        }
    };
    let config = LlamaConfig::from_hugging_face(&folder)?;
    println!("{} parameters on {ranks} ranks", config.num_params());
    // Errors in the files are found here, before any rank starts.
    WeightsFile::open(&folder, config)?;
    let layers = ShardPolicy::new().units(["layers.*"]);
    let matrices = ParamGroup::from_predicate("layers");
    let adapters = Lora::new(8, 16.0).set_param_group(matrices);
    for policy in [layers.clone(), layers.lora(adapters)] {
        let (folder, saved) = (folder.clone(), made.path().join("adapters.bpk"));
        let losses = launch(LaunchConfig::new(ranks), move |world| {
            train(&world, &folder, config, policy.clone(), &saved)
        })?;
        println!("losses of further training: {:?}", losses[0]);
        assert!(losses[0][2] < losses[0][0]);
    }
    println!(
        "the adapters alone take {} bytes",
        std::fs::metadata(made.path().join("adapters.bpk"))?.len()
    );
    Ok(())
}

/// Trains a model and saves the adapters that the policy adds. Every rank reads its own shards.
fn train(
    world: &ProcessGroup,
    folder: &Path,
    config: LlamaConfig,
    policy: ShardPolicy,
    saved: &Path,
) -> Result<Vec<f32>, Error> {
    let weights = WeightsFile::open(folder, config).expect("it was opened before");
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let model = config.blank(&device).expect("the sizes are valid");
    let model = fully_shard(model, &mesh, policy)?;
    let mut model: Llama = load_local_state(model, |tensor| {
        if tensor.path.contains(".lora.") {
            return Ok(None);
        }
        let values = weights.read(&tensor.path, tensor.range());
        let values = values.unwrap_or_else(|error| panic!("{error}"));
        let bytes = values.into_iter().flat_map(f32::to_ne_bytes);
        Ok::<_, Error>(Some(bytes.collect()))
    })?;
    let memory = memory(&model)?;
    println!(
        "rank {} has read {} bytes of the files and holds {}",
        world.rank(),
        weights.num_bytes_read(),
        memory.parameters,
    );
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..3 {
        let tokens = Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5, 6, 7, 8]], &device);
        let targets = Tensor::<2, Int>::from_data([[2, 3, 4, 5, 6, 7, 8, 9]], &device);
        let loss = model.loss(tokens, targets);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = backward(loss, &model)?;
        model = optimizer.step(1e-3, model, gradients);
    }
    // Collective: every rank gets the whole record, and any one of them can write it.
    let adapters = model.into_record_group(ParamGroup::from_predicate("lora"));
    if world.rank() == 0 && !adapters.is_empty() {
        adapters.save(saved).expect("a writable folder");
    }
    Ok(losses)
}
