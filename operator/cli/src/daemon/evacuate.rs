//! `mercury evacuate`: gives the daemon its order, or asks for its state.

use super::{
    SOCKET,
    order::{Answer, Order},
};
use clap::Args;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    say::Say,
};
use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

#[derive(Debug, Args)]
pub struct EvacuateArgs {
    /// Reason, for the log and for `--status`
    #[arg(long, value_name = "TEXT", default_value = "by order")]
    pub reason: String,
    /// Give no order: show the daemon's state
    #[arg(long, conflicts_with = "reason")]
    pub status: bool,
    /// Control socket of the daemon
    #[arg(long, value_name = "FILE", default_value = SOCKET)]
    pub socket: PathBuf,
}

/// Time for the daemon's answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives the order without waiting for the move.
///
/// # Errors
///
/// Returns an error if there is no daemon, or it refuses the order.
pub fn run(args: &EvacuateArgs, say: Say<'_>) -> Result<Exit> {
    access::need_root("evacuate")?;
    let order = if args.status { Order::Status {} } else { Order::Evacuate { reason: args.reason.clone() } };
    let answer = ask(&args.socket, &order).map_err(|error| no_daemon(&args.socket, &error))?;
    match &answer.refused {
        Some(why) => {
            let exit = if answer.busy { Exit::Busy } else { Exit::Failed };
            Err(Error::new(exit, format!("mercuryd refuses the order: {why}"))
                .hint("`mercury evacuate --status` shows the daemon's state"))
        }
        None => Ok(say.done(&answer)),
    }
}

/// Sends an order and returns the answer.
///
/// # Errors
///
/// Returns an error if no daemon listens, or it does not answer.
pub fn ask(socket: &Path, order: &Order) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = serde_json::to_string(order)?;
    text.push('\n');
    stream.write_all(text.as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

fn no_daemon(socket: &Path, error: &io::Error) -> Error {
    Error::new(Exit::State, format!("no answer from mercuryd at {}: {error}", socket.display())).hint(
        "`systemctl start mercuryd` starts it, if MERCURY_DESTINATION=HOST is in /etc/default/mercuryd \
             and the destination's pairing token is in /etc/mercury/destination.key",
    )
}
