//! The fields when the module is copied, mapped, recorded, summoned and averaged.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn_fsdp_shard::{
    Agreement, Error, ShardPolicy, WriteBack, auto_units, catch, check_agreement, check_names,
    full_state, fully_shard, fully_shard_from, into_record, load_local_state, local_ids,
    local_state, memory, moving_average, num_params, param_id, parameter_paths, recorded_state,
    renew_stand_ins, stand_in_bytes, summon_full_params, units_of_params, unsharded, wrap_plan,
};

use super::bench::{device, on_ranks, optimizer, params, whole_params};
use super::model::{Net, Once, Tied, build, mesh, once, step, whole};

fn apart() -> ShardPolicy {
    ShardPolicy::new().units(["embed", "blocks.*", "head"])
}

/// The values that the fields give to the model's own code.
fn fields(model: &Tied) -> [Vec<f32>; 3] {
    let params = [
        &model.embed.weight,
        &model.middle.weight,
        &model.head.weight,
    ];
    params.map(|param| {
        let values = param.val().into_data().convert::<f32>();
        values.try_to_vec().expect("numbers")
    })
}

fn assert_equal(model: &Tied) -> Vec<f32> {
    let [first, second, third] = fields(model);
    assert_eq!(first, second);
    assert_eq!(first, third);
    first
}

/// A clone is independent, with all of its fields; so is the result of `valid`.
#[test]
fn each_copy_has_its_own_value_in_all_fields() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let mut optim = optimizer();
            let first = build(&world, apart())?;
            // Cloning parts does not change this.
            let part = first.embed.clone();
            let kept = first.clone();
            let before = assert_equal(&kept.valid());
            let evaluated = first.valid();
            let (model, _) = step(first, &mut optim, (world.rank(), 0))?;
            let after = assert_equal(&model.valid());
            assert_ne!(before, after);
            assert_eq!(assert_equal(&kept), before);
            let again = kept.clone();
            let thrice = again.clone();
            assert_eq!(assert_equal(&thrice), before);
            assert_eq!(assert_equal(&again), before);
            drop((again, thrice));
            assert_eq!(assert_equal(&evaluated), before);
            // A step of the clone, which the module does not see.
            let (kept, _) = step(kept, &mut optimizer(), (world.rank(), 1))?;
            assert_ne!(assert_equal(&kept), before);
            assert_eq!(assert_equal(&model), after);
            // Training continues from `valid`.
            let again = evaluated.train();
            let (again, _) = step(again, &mut optimizer(), (world.rank(), 0))?;
            assert_eq!(assert_equal(&again), after);
            drop(part);
            Ok(())
        });
    }
}

/// A clone of only the second field has no value, and names the missing field.
#[test]
fn a_field_without_the_first_is_refused() {
    on_ranks(1, |world| {
        let model = build(&world, apart())?;
        let head = model.head.clone();
        let error = catch(|| head.weight.val()).expect_err("alone");
        assert_names(&error, "embed.weight", "head.weight");
        // The module is unchanged, and so is a clone of it.
        let clone = model.clone();
        assert_eq!(assert_equal(&clone), assert_equal(&model));
        Ok(())
    });
}

fn assert_names(error: &Error, first: &str, second: &str) {
    assert!(matches!(error, Error::Tied { .. }), "{error}");
    let names = format!("`{first}` and `{second}`");
    assert!(error.to_string().contains(&names), "{error}");
}

/// Counts the paths of the table that it sees, and doubles everything that it sees.
#[derive(Default)]
struct Double {
    path: Vec<String>,
    seen: Vec<String>,
}

impl ModuleMapper for Double {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A sharded parameter shows its shard.
        if D == 1 {
            self.seen.push(self.path.join("."));
        }
        param.map(|value| {
            let is_trained = value.is_require_grad();
            value.mul_scalar(2.0).detach().set_require_grad(is_trained)
        })
    }
}

#[test]
fn a_map_visits_the_shard_once_and_updates_all_fields() {
    on_ranks(2, |world| {
        let model = build(&world, apart())?;
        let before = assert_equal(&model);
        let mut double = Double::default();
        let model = model.map(&mut double);
        let after = assert_equal(&model);
        assert!(before.iter().zip(&after).all(|(a, b)| 2.0 * a == *b));
        let of_table = |path: &&String| *path == "embed.weight";
        assert_eq!(double.seen.iter().filter(of_table).count(), 1);
        let of_head = |path: &&String| *path == "head.weight" || *path == "middle.weight";
        assert_eq!(double.seen.iter().filter(of_head).count(), 0);
        assert!(stand_in_bytes(&model)? > 1000);
        let model = renew_stand_ins(model)?;
        assert!(stand_in_bytes(&model)? < 1000);
        assert_equal(&model);
        Ok(())
    });
}

#[test]
fn records_have_both_paths_and_load_if_their_values_are_equal() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let device = device();
            let model = build(&world, apart())?;
            let (model, _) = step(model, &mut optimizer(), (world.rank(), 0))?;
            let want = whole(&model);
            // This crate's record, while another copy is alive, and a plain module's.
            let other = step(model.clone(), &mut optimizer(), (world.rank(), 1))?.0;
            let record = into_record(model.clone())?;
            let plain = Tied::of_rank(5, &device).load_record(record);
            drop(other);
            assert_eq!(once(params(&plain)), want);
            assert_eq!(plain.embed.weight.id, plain.head.weight.id);
            let fresh = build(&world, apart())?;
            let fresh = fresh.load_record(plain.into_record());
            assert_eq!(whole(&fresh), want);
            assert_eq!(param_id(&fresh.embed.weight), param_id(&fresh.head.weight));
            let (fresh, _) = step(fresh, &mut optimizer(), (world.rank(), 2))?;
            let (model, _) = step(model, &mut optimizer(), (world.rank(), 2))?;
            assert_eq!(whole(&fresh), whole(&model));
            // Tensor by tensor.
            let mut paths = Vec::new();
            recorded_state(&model, |tensor| paths.push(tensor.path))?;
            let expected = match world.rank() {
                0 => parameter_paths(&model),
                _ => Vec::new(),
            };
            assert_eq!(paths, expected);
            Ok(())
        });
    }
}

/// Burn without sharding leaves two fields in this state after a step.
#[test]
fn a_record_whose_fields_differ_is_refused_by_name() {
    on_ranks(2, |world| {
        let model = build(&world, apart())?;
        let mut plain = Tied::of_rank(0, &device());
        plain.head.weight = plain.head.weight.map(|value| value + 1.0);
        let record = plain.into_record();
        let error = catch(|| model.load_record(record)).expect_err("they differ");
        assert_names(&error, "embed.weight", "head.weight");
        Ok(())
    });
}

#[test]
fn a_summoned_copy_is_tied_and_must_stay_so() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let model = build(&world, apart())?;
            let before = whole(&model);
            let model = summon_full_params(model, WriteBack::Keep, |mut full| {
                assert_eq!(once(params(&full)), before);
                assert_eq!(full.embed.weight.id, full.head.weight.id);
                full.embed.weight = full.embed.weight.map(|value| value + 1.0);
                full.middle.weight = full.middle.weight.map(|value| value + 1.0);
                full.head.weight = full.head.weight.map(|value| value + 1.0);
                full
            })?;
            let after = whole(&model);
            let pairs = before[0].1.iter().zip(&after[0].1);
            assert!(pairs.clone().all(|(a, b)| a + 1.0 == *b));
            let error = summon_full_params(model.clone(), WriteBack::Keep, |mut full| {
                full.head.weight = full.head.weight.map(|value| value + 1.0);
                full
            });
            assert_names(
                &error.expect_err("they differ"),
                "embed.weight",
                "head.weight",
            );
            let whole = unsharded(&model, world.rank() == 0)?;
            assert_eq!(whole.is_some(), world.rank() == 0);
            if let Some(whole) = whole {
                assert_eq!(once(params(&whole)), after);
            }
            Ok(())
        });
    }
}

/// The engine's own references to the module do not count as a copy of it.
#[test]
fn another_copy_may_be_read_while_the_module_is_summoned() {
    on_ranks(2, |world| {
        let model = build(&world, apart())?;
        let kept = model.clone();
        let before = assert_equal(&kept);
        let (model, _) = step(model, &mut optimizer(), (world.rank(), 0))?;
        summon_full_params(model, WriteBack::Discard, |full| {
            assert_eq!(assert_equal(&kept), before);
            full
        })?;
        Ok(())
    });
}

#[test]
fn tied_parameters_occur_once_in_states_counts_and_plans() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let plain = Tied::of_rank(0, &device());
            let paths = parameter_paths(&plain);
            let num = num_params(&Once::of_rank(0, &device()));
            assert_eq!(num_params(&plain), num);
            let model = build(&world, apart())?;
            check_names(&paths, &model)?;
            assert_eq!(num_params(&model), num);
            assert_eq!(wrap_plan(&model)?.num_params(), num);
            check_agreement(&model, Agreement::Parameters)?;
            let state = local_state(&model)?;
            assert_eq!(state.len(), paths.len() - 2);
            for tensor in &state {
                let tied: &[&str] = match tensor.path.as_str() {
                    "embed.weight" => &["middle.weight", "head.weight"],
                    _ => &[],
                };
                assert_eq!(tensor.tied, tied, "{}", tensor.path);
            }
            assert_eq!(local_ids(&model)?.len(), paths.len() - 2);
            let id = param_id(&model.embed.weight);
            assert_eq!(param_id(&model.head.weight), id);
            let of_table = ("embed.weight".to_owned(), "embed".to_owned());
            assert!(units_of_params(&model).contains(&of_table));
            assert_eq!(units_of_params(&model).len(), paths.len() - 2);
            let mut seen = Vec::new();
            full_state(&model, |tensor| seen.push(tensor.path.to_owned()))?;
            assert!(!seen.contains(&"head.weight".to_owned()));
            let model = load_local_state(model, |tensor| {
                Ok::<_, Error>(Some(tensor.elements.as_bytes().to_vec()))
            })?;
            assert_equal(&model);
            drop(memory(&model)?);
            Ok(())
        });
    }
    let plain = Tied::of_rank(0, &device());
    assert_eq!(auto_units(&plain, 160), ["embed", "blocks.0", "blocks.1"]);
}

#[test]
fn a_moving_average_updates_all_tied_fields() {
    on_ranks(2, |world| {
        let model = build(&world, apart())?;
        let average = model.clone();
        let before = assert_equal(&model);
        let (model, _) = step(model, &mut optimizer(), (world.rank(), 0))?;
        let after = assert_equal(&model.valid());
        let average = moving_average(average, &model, 0.75)?;
        let got = assert_equal(&average.valid());
        for ((got, before), after) in got.iter().zip(&before).zip(&after) {
            assert!((got - 0.75 * before - 0.25 * after).abs() < 1e-6);
        }
        assert_eq!(assert_equal(&model.valid()), after);
        Ok(())
    });
}

/// A source may have any of the names.
#[test]
fn tied_parameters_are_read_under_any_path() {
    for ranks in 1..=3 {
        for names in [
            &["embed.weight"][..],
            &["head.weight"],
            &["embed.weight", "head.weight"],
            &["middle.weight", "head.weight"],
        ] {
            on_ranks(ranks, move |world| {
                let mesh = mesh(&world, 1)?;
                let blank = Tied::of_rank(0, &device());
                let model = fully_shard_from(blank, &mesh, apart(), |part| {
                    let is_read = names.contains(&part.path);
                    let values = part.range.clone().flat_map(|i| (i as f32).to_le_bytes());
                    Ok::<_, Error>(is_read.then(|| values.collect()))
                })?;
                let values = assert_equal(&model);
                assert!(
                    values
                        .iter()
                        .enumerate()
                        .all(|(i, value)| i as f32 == *value)
                );
                Ok(())
            });
        }
    }
    on_ranks(1, |world| {
        let mesh = mesh(&world, 1)?;
        let blank = Tied::of_rank(0, &device());
        let error = fully_shard_from(blank, &mesh, apart(), |part| {
            let by = if part.path == "head.weight" { 1.0 } else { 0.0 };
            let is_table = part.path.ends_with("d.weight");
            let values = part
                .range
                .clone()
                .flat_map(|i| (i as f32 + by).to_le_bytes());
            Ok::<_, Error>(is_table.then(|| values.collect()))
        });
        assert_names(
            &error.expect_err("they differ"),
            "embed.weight",
            "head.weight",
        );
        Ok(())
    });
}

/// A module inside another module that is sharded later.
#[test]
fn a_part_with_all_fields_may_be_sharded_first() {
    #[derive(Module, Debug)]
    struct Outer {
        inner: Tied,
        last: burn::nn::Linear,
    }
    on_ranks(2, |world| {
        let inner = build(&world, apart())?;
        let last = burn::nn::LinearConfig::new(3, 5).init(&device());
        let outer = Outer { inner, last };
        let outer = fully_shard(outer, &mesh(&world, 1)?, ShardPolicy::new())?;
        assert_equal(&outer.inner);
        let state = local_state(&outer)?;
        assert_eq!(state[0].path, "inner.embed.weight");
        assert_eq!(state[0].tied, ["inner.middle.weight", "inner.head.weight"]);
        let _ = whole_params(outer.inner.valid(), &outer.inner);
        Ok(())
    });
}
