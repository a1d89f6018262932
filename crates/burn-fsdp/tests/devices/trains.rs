//! Steps on a backend, without checkpoints.

use burn::tensor::{Device, TensorData};
use burn_fsdp::internals::compile::{ShardSpec, compile_on};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::{Error, LaunchConfig, ProcessGroup, Strategy, launch};
use burn_fsdp_models::Gpt;

use crate::backends::Tested;
use crate::runs::{
    CONFIG, Division, Engine, Run, Tokens, adamw, assert_close, batch, compiled_step, plainly,
};

/// The losses are those of Burn's own loop on the CPU.
pub(crate) fn train_like_burn<B: Tested>() {
    let expected = plainly(4, &Device::flex());
    for division in Division::all::<B>() {
        for ranks in 1..=4 {
            let run = Run {
                engine: Engine::Compiled,
                division,
                ranks,
                from: None,
                steps: 0..4,
                to: None,
            };
            let what = format!("{run:?}");
            assert_close(&run.on::<B>(), &expected, division.tolerance::<B>(), &what);
        }
    }
}

/// Values that each rank reads for itself replace those that the module would have.
pub(crate) fn start_from_values<B: Tested>() {
    let division = Division {
        strategy: Strategy::FullShard,
        compute: None,
    };
    for ranks in 1..=4 {
        let body = move |world: ProcessGroup| -> Result<(), Error> {
            let mut made = compiled_step::<B>(division.mode(&world))?;
            let specs = made.parameters().to_vec();
            let stored = specs.iter().map(|spec| {
                let data = made.parameter(&spec.path)?;
                Ok((spec.path.clone(), data.try_to_vec::<f32>().expect("floats")))
            });
            let stored = stored.collect::<Result<Vec<_>, Error>>()?;
            let read = |part: &ShardSpec<'_>| {
                let found = stored.iter().find(|(path, _)| *path == part.whole.path);
                let Region::Flat(range) = &part.region else {
                    panic!("{} is not flat", part.region);
                };
                let values = found.map(|(_, values)| values[range.clone()].to_vec());
                Ok(values.map(|values| TensorData::new(values, part.shape.clone())))
            };
            // The module's own values differ.
            let init = |device: &Device| CONFIG.init(device, 5).expect("valid");
            let loss = |model: &Gpt, (tokens, targets): Tokens| model.loss(tokens, targets);
            let on = (&B::device(), B::own());
            let mode = division.mode(&world);
            let mut step = compile_on::<B, _, _, _, _, _, Error>(
                (init, read),
                loss,
                adamw().build(),
                mode,
                (),
                on,
            )?;
            let batch = batch(0, (world.rank(), world.size()), &B::device());
            assert_eq!(step.step(1e-2, &batch)?, made.step(1e-2, &batch)?);
            Ok(())
        };
        launch(LaunchConfig::new(ranks), body).unwrap_or_else(|error| panic!("{error}"));
    }
}
