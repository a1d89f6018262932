//! The `burn-fsdp launch` command: restarts a failed training run, and passes signals on to it.

mod below;
mod signals;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use signal_hook::consts::SIGTERM;

use crate::console;
use crate::error::{Failure, InputError};
use crate::tether::Tether;
use below::{Below, Left};
use signals::{Order, Signals};

pub(crate) use signals::ONE_REQUEST;

#[derive(Debug, Args)]
#[command(after_help = LAUNCH_AFTER_HELP, after_long_help = LAUNCH_AFTER_LONG_HELP)]
pub(crate) struct LaunchArgs {
    /// Maximum number of restarts; a command that exits with 2, an input error, is not restarted
    #[arg(long, value_name = "TIMES", default_value_t = 3)]
    pub(crate) max_restarts: usize,
    /// Number of ranks for each start, substituted for {ranks} in the command
    ///
    /// Takes a comma-separated list. Further starts use its last number.
    #[arg(long, value_name = "RANKS", value_delimiter = ',')]
    pub(crate) ranks: Vec<usize>,
    /// Command to run, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

const LAUNCH_AFTER_HELP: &str = "\
Examples:
  burn-fsdp launch --max-restarts 10 -- \\
      mpirun -n 4 burn-fsdp train --checkpoint-dir run --save-every 50 --resume=newest-good
  burn-fsdp launch --ranks 4,3,2 -- \\
      mpirun -n {ranks} burn-fsdp train --batch 12 --checkpoint-dir run --resume

The exit code is the command's, or 128 + N if signal N ended it. `--help` also describes signals.";

const LAUNCH_AFTER_LONG_HELP: &str = "\
Signals:
  SIGTERM, SIGINT, SIGHUP and SIGUSR1 make all training runs below save and exit, even inside scripts
  and launchers. Nothing is started after that. Signals within one second count as one. A later
  signal, or SIGQUIT, ends the training runs at once.

  If no process below is burn-fsdp, the signal goes to the command's process group. It also goes
  there if a script runs another command for more than 5 s after its training runs.

  `launch` waits for a process that ignores or traps the first signal. 5 s after the later signal or
  SIGQUIT, it kills all remaining processes. If `launch` itself is killed, the training runs below
  also save and exit.

Environment of the command:
  BURN_FSDP_RESTART  number of the restart, 0 for the first start

The exit code is the command's, or 128 + N if signal N ended it.";

/// Exit code for an error in the command's input, which a restart would not fix.
const INPUT: i32 = 2;

/// The time between two checks for the end of the command.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The time between two checks of the processes below, after an order or the end of the command.
const LOOK_BELOW_EVERY: Duration = Duration::from_millis(100);

/// Time in which a process that the command leaves behind may still become a training run: `setsid` and `nohup` leave a
/// process that starts the next program only after they have ended.
const SETTLING: Duration = Duration::from_secs(1);

/// Maximum pause before a restart.
const MOST_PAUSE: Duration = Duration::from_secs(30);

/// The environment variable with the number of the restart.
pub(crate) const RESTART: &str = "BURN_FSDP_RESTART";

/// The placeholder for the number of ranks.
const RANKS: &str = "{ranks}";

/// Runs the command until it succeeds, with at most as many restarts as the arguments allow. Returns the exit code of
/// its last run.
pub(crate) fn run(
    args: &LaunchArgs,
    resumes: impl Fn(&[String]) -> bool,
) -> Result<ExitCode, Failure> {
    check(args, resumes)?;
    let signals = Signals::obey();
    let tether = Tether::new().map_err(|error| cannot_run(args, &error))?;
    let mut restarts = 0;
    loop {
        let mut child = start(args, restarts, &tether)?;
        let began = Instant::now();
        let mut below = Below::new(child.id(), tether.variable());
        let status = wait(&mut child, &mut below, &signals);
        let status = status.map_err(|error| cannot_run(args, &error))?;
        let code = code_of(status);
        if status.success() || code == INPUT || signals.have_come() {
            return Ok(exit_code(code));
        }
        if restarts == args.max_restarts {
            console::tell(format_args!(
                "error: the command ended with {status} after {} s; it was restarted {restarts} times, and \
                 --max-restarts allows no more",
                began.elapsed().as_secs()
            ));
            return Ok(exit_code(code));
        }
        restarts += 1;
        let pause = Duration::from_millis(500 << restarts.min(6)).min(MOST_PAUSE);
        console::tell(format_args!(
            "warning: the command ended with {status} after {} s; start {} of {} follows in {:.1} s",
            began.elapsed().as_secs(),
            restarts + 1,
            args.max_restarts + 1,
            pause.as_secs_f64()
        ));
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if signals.take().is_some() {
                return Ok(exit_code(code));
            }
            sleep(LOOK_EVERY);
        }
    }
}

/// Rejects arguments that could not have the intended effect.
fn check(args: &LaunchArgs, resumes: impl Fn(&[String]) -> bool) -> Result<(), InputError> {
    let has_place = args.command.iter().any(|word| word.contains(RANKS));
    if !args.ranks.is_empty() && !has_place {
        return Err(InputError::Restart {
            problem: "--ranks has no effect because the command does not contain {ranks}; write {ranks} in it, or \
                 leave out --ranks",
        });
    }
    if args.ranks.is_empty() && has_place {
        return Err(InputError::Restart {
            problem: "the command contains {ranks}; pass --ranks, such as --ranks 4,3,2",
        });
    }
    let is_own = |pair: &[String]| pair[0].ends_with("burn-fsdp") && pair[1] == "train";
    let words = words(args, 0);
    let training = words.windows(2).position(is_own);
    let starts_over = training.is_some_and(|at| !resumes(&words[at + 2..]));
    if args.max_restarts > 0 && starts_over {
        return Err(InputError::Restart {
            problem: "each restart of `train` would train from scratch; pass it --checkpoint-dir, --save-every and \
                 --resume=newest-good",
        });
    }
    Ok(())
}

/// Returns the command of an attempt, with its number of ranks in place of `{ranks}`.
fn words(args: &LaunchArgs, restarts: usize) -> Vec<String> {
    let ranks = args.ranks.get(restarts).or(args.ranks.last());
    let filled = |word: &String| match ranks {
        Some(ranks) => word.replace(RANKS, &ranks.to_string()),
        None => word.clone(),
    };
    args.command.iter().map(filled).collect()
}

fn start(args: &LaunchArgs, restarts: usize, tether: &Tether) -> Result<Child, InputError> {
    let mut words = words(args, restarts).into_iter();
    let program = words.next().unwrap_or_default();
    let mut command = Command::new(program);
    command.args(words);
    let (tie, value) = tether.variable();
    command.env(RESTART, restarts.to_string()).env(tie, value);
    // Only this process receives a terminal's signal, and it passes the signal on once.
    command.process_group(0);
    command.spawn().map_err(|error| cannot_run(args, &error))
}

fn cannot_run(args: &LaunchArgs, error: &std::io::Error) -> InputError {
    InputError::CannotRun {
        program: args.command.first().cloned().unwrap_or_default(),
        problem: error.to_string(),
    }
}

/// Waits for the end of the command and of the training runs below it, and passes signals on. Asks training runs that a
/// failed command leaves behind to end, because they would block the next start.
fn wait(child: &mut Child, below: &mut Below, signals: &Signals) -> std::io::Result<ExitStatus> {
    let mut ended = None;
    let mut look_at = Instant::now();
    let mut settled_at = look_at;
    let mut was_empty = false;
    loop {
        if ended.is_none() {
            ended = child.try_wait()?;
            if ended.is_some() {
                look_at = Instant::now();
                settled_at = look_at + SETTLING;
            }
        }
        if let Some(order) = signals.take() {
            below.obey(order);
        }
        if look_at <= Instant::now() {
            look_at = Instant::now() + LOOK_BELOW_EVERY;
            below.tell_late();
            if let Some(status) = ended {
                let Left {
                    num_awaited,
                    has_others,
                } = below.left();
                let may_train = Instant::now() < settled_at && !below.has_order() && has_others;
                let is_empty = num_awaited == 0 && !may_train;
                // While a process starts a program, it briefly has no environment, and is not seen.
                if is_empty && was_empty {
                    return Ok(status);
                }
                was_empty = is_empty;
                if num_awaited > 0 && !status.success() && !below.has_order() {
                    console::tell(format_args!(
                        "warning: the command ended with {status} and left {num_awaited} processes behind; telling \
                         them to end"
                    ));
                    below.obey(Order::End(SIGTERM));
                }
            }
        }
        sleep(LOOK_EVERY);
    }
}

/// Returns the exit code of a command; for a signal, the code that a shell would report.
fn code_of(status: ExitStatus) -> i32 {
    match status.signal() {
        Some(signal) => 128 + signal,
        None => status.code().unwrap_or(1),
    }
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
