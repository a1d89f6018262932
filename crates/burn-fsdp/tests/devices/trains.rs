//! Steps on a backend, without checkpoints.

use burn::tensor::{Device, TensorData};
use burn_fsdp::internals::compile::graph::Stage;
use burn_fsdp::internals::compile::{ShardSpec, compile_on};
use burn_fsdp::internals::inspect::{Staged, Transfers};
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::{Check, Error, LaunchConfig, ProcessGroup, Strategy, launch};
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

/// Ranks that are threads exchange tensors in the memory of their device. If they compare bytes, they do so on the host:
/// each collective reads back every tensor that it sends, and copies every result to the device. Nothing else is copied,
/// and nothing at all on the CPU.
pub(crate) fn count_copies<B: Tested>() {
    let strategies = [Strategy::FullShard, Strategy::NoShard];
    let checks = [Check::Calls, Check::Agreement];
    for (strategy, check) in strategies.into_iter().flat_map(|s| checks.map(|c| (s, c))) {
        let is_direct = B::device() == Device::flex() || check == Check::Calls;
        let division = Division {
            strategy,
            compute: None,
        };
        let body = move |world: ProcessGroup| -> Result<(), Error> {
            let mut step = compiled_step::<B>(division.mode(&world))?;
            let batch = batch(0, (world.rank(), world.size()), &B::device());
            step.step(1e-2, &batch)?;
            let first = step.staged();
            step.step(1e-2, &batch)?;
            let second = step.staged();
            let mut expected = Staged::default();
            let nodes = step.graph().expect("it has run").nodes();
            for collective in nodes.iter().filter_map(|node| node.collective.as_ref()) {
                let contract = collective.kind.contract();
                for part in &collective.parts {
                    if collective.stage != Stage::Wait {
                        let len = part.share_len(contract.gives.share, world.rank());
                        expected.to_host.number += 1;
                        expected.to_host.bytes += len * part.dtype.size();
                    }
                    if collective.stage != Stage::Start {
                        let len = part.padded_len(contract.gets.share);
                        expected.to_device.number += 1;
                        expected.to_device.bytes += len * part.result.size();
                    }
                }
            }
            if strategy == Strategy::NoShard {
                // All gradients and the loss.
                let sizes = step.parameters().iter();
                let sizes = sizes.map(|of| of.shape.iter().product::<usize>());
                let all = 4 * (sizes.sum::<usize>() + 1);
                let number = step.parameters().len() + 1;
                let all = Transfers { number, bytes: all };
                assert_eq!((expected.to_host, expected.to_device), (all, all));
            }
            if is_direct {
                expected = Staged::default();
            }
            assert_eq!(first, expected);
            assert_eq!(second, [expected; 2].into_iter().sum());
            Ok(())
        };
        launch(LaunchConfig::new(2).check(check), body).unwrap_or_else(|error| panic!("{error}"));
    }
}
