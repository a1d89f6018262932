//! A module of a different type that is traced in place of the step's, compared with Burn's loop over it on one rank.

use burn::module::{Module, ModuleDisplay, Param};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_certificate::{compile, compile_with};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Strategy;
use burn_fsdp_spmd::passes::schedule::{OptimizerPlace, Options};
use burn_fsdp_spmd::{DataParallel, Error, Evaluation, Mode, Override, OverrideError};

use crate::compiled::seeded;
use crate::eager::{self, adamw, floats};

const STEPS: usize = 5;
const ROWS: usize = 12;

/// A part between two layers.
trait Between: Module + ModuleDisplay + 'static {
    fn between(&self, x: Tensor<2>) -> Tensor<2>;
}

/// The part comes first: the tensors that a stand-in adds are visited before the model's.
#[derive(Module, Debug)]
struct Model<P: Module> {
    part: P,
    fc: Linear,
    out: Linear,
}

impl<P: Between> Model<P> {
    fn with(part: P, device: &Device) -> Self {
        Self {
            part,
            fc: LinearConfig::new(5, 7).init(device),
            out: LinearConfig::new(7, 3).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.out.forward(self.part.between(self.fc.forward(x)))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        (self.forward(x) - 1).square().mean()
    }
}

/// Reads a value.
#[derive(Module, Debug)]
struct Looks;

impl Between for Looks {
    fn between(&self, x: Tensor<2>) -> Tensor<2> {
        assert!(x.clone().sum().into_scalar::<f32>().is_finite());
        x.tanh()
    }
}

/// Does not read a value.
#[derive(Module, Debug)]
struct Trusts;

impl Between for Trusts {
    fn between(&self, x: Tensor<2>) -> Tensor<2> {
        x.tanh()
    }
}

/// Has parameters of its own, one of them frozen.
#[derive(Module, Debug)]
struct Gated {
    gate: Param<Tensor<1>>,
    shift: Param<Tensor<1>>,
}

impl Gated {
    fn new(device: &Device) -> Self {
        let filled = |value| Initializer::Constant { value }.init([7], device);
        Self {
            gate: filled(0.5),
            shift: filled(0.25).no_grad(),
        }
    }
}

impl Between for Gated {
    fn between(&self, x: Tensor<2>) -> Tensor<2> {
        x.tanh() * self.gate.val().unsqueeze() + self.shift.val().unsqueeze()
    }
}

struct Trust;

impl Override<Model<Looks>> for Trust {
    type Traced = Model<Trusts>;

    fn replace(&self, module: Model<Looks>) -> Model<Trusts> {
        Model {
            part: Trusts,
            fc: module.fc,
            out: module.out,
        }
    }
}

struct Gate;

impl<P: Between> Override<Model<P>> for Gate {
    type Traced = Model<Gated>;

    fn replace(&self, module: Model<P>) -> Model<Gated> {
        let device = module.fc.weight.lazy_device();
        Model {
            part: Gated::new(&device),
            fc: module.fc,
            out: module.out,
        }
    }
}

/// Makes the added tensors from the module's own values.
struct Derive;

impl<P: Between> Override<Model<P>> for Derive {
    type Traced = Model<Gated>;

    fn replace(&self, module: Model<P>) -> Model<Gated> {
        let column = |plus: f32| {
            let mean = module.fc.weight.val().mean_dim(0).reshape([7]);
            (mean + plus).detach()
        };
        Model {
            part: Gated {
                gate: Param::from_tensor(column(0.5)),
                shift: Param::from_tensor(column(0.0)).no_grad(),
            },
            fc: module.fc,
            out: module.out,
        }
    }
}

fn looking(device: &Device) -> Model<Looks> {
    Model::with(Looks, device)
}

fn rows(step: usize, first: usize, rows: usize, device: &Device) -> Tensor<2> {
    let values =
        (first * 5..(first + rows) * 5).map(|i| ((i * 37 + step * 11) % 17) as f32 / 8.0 - 1.0);
    Tensor::from_data(
        TensorData::new(values.collect::<Vec<_>>(), [rows, 5]),
        device,
    )
}

/// Runs Burn's loop over the module that an override makes from the model, whose values exist first.
fn expected<V: Override<Model<Looks>, Traced = Model<P>>, P: Between>(over: V) -> eager::Trained {
    let init = |device: &Device| {
        let model = looking(device);
        let _ = floats(&model);
        over.replace(model)
    };
    let batch = |step, device: &Device| rows(step, 0, ROWS, device);
    eager::train(
        init,
        Model::<P>::loss,
        batch,
        STEPS,
        |_| 1e-2,
        adamw().init(),
    )
}

fn check<V, P>(over: fn() -> V, added: &'static [&'static str])
where
    V: Override<Model<Looks>, Traced = Model<P>> + 'static,
    P: Between,
{
    let one = expected(over());
    let own = ["fc.weight", "fc.bias", "out.weight", "out.bias"];
    let styles: [DataParallel; 3] = [
        Strategy::FullShard.into(),
        Strategy::NoShard.into(),
        DataParallel::Automatic,
    ];
    for style in styles {
        for ranks in 1..=4 {
            for place in [OptimizerPlace::InBackward, OptimizerPlace::InNextForward] {
                Device::flex().seed(1);
                let body = move |world: ProcessGroup| -> Result<_, Error> {
                    let device = Device::flex();
                    let options = Options::default().optimizer(place);
                    let mode = Mode::data_parallel(world.clone(), style).options(options);
                    let mode = mode.verified().certified();
                    let loss = Model::<P>::loss;
                    let mut step = compile_with(looking, loss, adamw().build(), mode, over())?;
                    let paths: Vec<_> =
                        step.parameters().iter().map(|of| of.path.clone()).collect();
                    let names: Vec<&str> = paths.iter().map(AsRef::as_ref).collect();
                    assert_eq!(names, [&own, added].concat(), "the model's own come first");
                    // An evaluation by a module of the model's own type, and by the traced one, before and between
                    // steps.
                    let mut own = Evaluation::new(
                        |device: &Device| Model::with(Trusts, device),
                        |model: &Model<Trusts>, x: Tensor<2>| model.fc.forward(x),
                    );
                    let mut whole = Evaluation::new(
                        move |device: &Device| over().replace(looking(device)),
                        |model: &Model<P>, x: Tensor<2>| model.loss(x),
                    );
                    let part = ROWS / world.size();
                    let x = |index| rows(index, world.rank() * part, part, &device);
                    let mut losses = Vec::new();
                    for index in 0..STEPS {
                        if index > 0 {
                            let wide: Tensor<2> = step.evaluate(&mut own, &x(index))?;
                            assert_eq!(wide.dims()[1], 7);
                            let _: Tensor<1> = step.evaluate(&mut whole, &x(index))?;
                        }
                        losses.push(step.step(1e-2, &x(index))?);
                    }
                    let mut parameters = Vec::new();
                    for path in paths {
                        let values = step.parameter(&path)?.try_to_vec::<f32>().expect("floats");
                        parameters.push((path.to_string(), values));
                    }
                    Ok((losses, parameters))
                };
                let got = launch(LaunchConfig::new(ranks), body).unwrap();
                let what = format!("{style:?} on {ranks}, {place:?}");
                for (losses, parameters) in &got {
                    for (loss, want) in losses.iter().zip(&one.losses) {
                        let want = f64::from(*want);
                        assert!(
                            (loss - want).abs() <= 1e-5 * want,
                            "{what}: {loss}, not {want}"
                        );
                    }
                    for (path, values) in parameters {
                        let want = one.parameters[path].try_to_vec::<f32>().expect("floats");
                        for (value, want) in values.iter().zip(&want) {
                            let differs = (value - want).abs() > 1e-5;
                            assert!(!differs, "{what}, {path}: {value}, not {want}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_stand_in_of_another_type_trains_the_models_own_parameters() {
    let _guard = seeded();
    let device = Device::flex();
    // The model without an override cannot be traced.
    let mut plain = compile(looking, Model::loss, adamw().build(), Mode::single()).unwrap();
    let error = plain.step(1e-2, &rows(0, 0, 2, &device)).unwrap_err();
    assert!(matches!(error, Error::Uncapturable { .. }), "{error}");
    check(|| Trust, &[]);
}

#[test]
fn parameters_added_by_a_stand_in_follow_the_models_own() {
    let _guard = seeded();
    check(|| (Trust, Gate), &["part.gate", "part.shift"]);
}

/// The values are drawn once, as in Burn's loop.
#[test]
fn values_derived_by_a_stand_in_start_from_the_models() {
    let _guard = seeded();
    check(|| (Trust, Derive), &["part.gate", "part.shift"]);
}

#[test]
fn a_stand_in_that_lacks_or_changes_a_parameter_is_refused() {
    let _guard = seeded();
    #[derive(Module, Debug)]
    struct Less {
        fc: Linear,
    }
    struct Lack;
    impl Override<Model<Looks>> for Lack {
        type Traced = Less;

        fn replace(&self, module: Model<Looks>) -> Less {
            Less { fc: module.fc }
        }
    }
    let loss = |model: &Less, x: Tensor<2>| model.fc.forward(x).mean();
    let error = compile_with(looking, loss, adamw().build(), Mode::single(), Lack).unwrap_err();
    let lacks = OverrideError::Lacks {
        path: "out.weight".to_owned(),
    };
    assert!(
        matches!(&error, Error::Override(of) if *of == lacks),
        "{error}"
    );
    struct Freeze;
    impl Override<Model<Looks>> for Freeze {
        type Traced = Model<Trusts>;

        fn replace(&self, module: Model<Looks>) -> Model<Trusts> {
            let mut model = Trust.replace(module);
            model.fc = model.fc.no_grad();
            model
        }
    }
    let loss = Model::<Trusts>::loss;
    let error = compile_with(looking, loss, adamw().build(), Mode::single(), Freeze).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("fc.weight") && said.contains("frozen"),
        "{said}"
    );
}
