//! `mercury evacuate`: gives the daemon its order, or asks what it is at.

use super::order::{Answer, Order};
use crate::{
    args::EvacuateArgs,
    commands::{self, Say},
    error::{Error, Result},
    exit::Exit,
};
use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

/// How long the daemon may take for its answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives the order; does not wait for what comes of it.
///
/// # Errors
/// If there is no daemon, or it does not take the order.
pub fn run(args: &EvacuateArgs, say: Say<'_>) -> Result<Exit> {
    commands::need_root("evacuate")?;
    let order = if args.status { Order::Status {} } else { Order::Evacuate { reason: args.reason.clone() } };
    let answer = ask(&args.socket, &order).map_err(|error| no_daemon(&args.socket, &error))?;
    match &answer.refused {
        Some(why) => {
            let exit = if answer.busy { Exit::Busy } else { Exit::Failed };
            Err(Error::new(exit, format!("mercuryd does not take the order: {why}"))
                .hint("`mercury evacuate --status` says what the daemon is at"))
        }
        None => Ok(say.done(&answer)),
    }
}

/// One order, one answer.
///
/// # Errors
/// If nobody listens, or nobody answers.
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
    Error::new(Exit::State, format!("no answer from mercuryd at {}: {error}", socket.display()))
        .hint("`systemctl start mercuryd` starts it, once MERCURY_SPARE=HOST is in /etc/default/mercuryd and the spare's line in \
             /etc/mercury/spare.key")
}
