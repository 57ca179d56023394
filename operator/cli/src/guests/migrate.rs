//! `mercury guests migrate`: orders a guest to move to another machine.
//!
//! The order goes through the guest's monitor to the driver in the guest, which starts `mercury migrate`
//! there. That command answers by the same way, a line of JSON for each message.

use super::find;
use crate::shared::TokenArg;
use clap::Args;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Format, Render, Text},
    say::{Say, print},
};
use mercury_guests::{Name, Root};
use mercury_relocation::migrate::pairing_token;
use serde::Serialize;
use serde_json::Value;
use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

/// Time until the command in the guest has begun, and until a guest ends that has moved.
const BEGINS_WITHIN: Duration = Duration::from_secs(60);
/// Largest message of a guest, and largest order.
const MESSAGE_MAX: u64 = 64 << 10;
const ORDER_MAX: usize = 3000;
const WORDS_MAX: usize = 24;

#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// The guest
    pub name: Name,
    /// The destination that waits in `mercury receive`: HOST or HOST:PORT, as the guest reaches it
    pub host: String,
    #[command(flatten)]
    pub token: TokenArg,
    /// Options for `mercury migrate` in the guest, after --
    #[arg(last = true, value_name = "OPTIONS")]
    pub options: Vec<String>,
}

/// Moves a guest. Returns when it runs at the destination, and no more here.
///
/// # Errors
/// The guest takes no order, or has not moved: it goes on.
pub fn migrate(root: &Root, args: &MigrateArgs, say: Say<'_>) -> Result<Moved> {
    let order = order(args)?;
    let guest = find(root, &args.name)?;
    let name = &args.name;
    let unreachable = |error: io::Error| {
        Error::new(Exit::Failed, format!("cannot reach the monitor of {name}: {error}"))
            .hint("a monitor of an earlier version takes no orders: type `mercury migrate` in the guest")
    };
    let socket = UnixStream::connect(guest.orders()).map_err(unreachable)?;
    socket.set_read_timeout(Some(BEGINS_WITHIN)).map_err(unreachable)?;
    (&socket).write_all(&order).map_err(unreachable)?;
    follow(name, &socket, say)
}

/// Returns the order: a variable of the environment and words, each with a NUL at its end, and a NUL.
fn order(args: &MigrateArgs) -> Result<Vec<u8>> {
    let token = pairing_token(args.token.key.as_deref())?;
    let mut words = vec![format!("MERCURY_KEY={token}"), "migrate".into()];
    // Nothing but this host starts a guest, so no tombstone would be read.
    words.extend(["--ordered", "--without-tombstone"].map(String::from));
    words.extend(args.options.iter().cloned());
    words.extend(["--".into(), args.host.clone()]);
    let is_sound = words.iter().all(|word| !word.is_empty() && !word.contains('\0'));
    let bytes = words.iter().map(|word| word.len() + 1).sum::<usize>();
    if !is_sound || words.len() > WORDS_MAX || bytes > ORDER_MAX {
        let text = format!(
            "an order has words that are not empty, {WORDS_MAX} and {ORDER_MAX} bytes of them at most"
        );
        return Err(Error::new(Exit::Usage, text).hint("give fewer options"));
    }
    words.push(String::new());
    Ok(words.into_iter().flat_map(|word| [word.into_bytes(), vec![0]].concat()).collect())
}

/// Passes on what the guest says, until it has moved or goes on.
fn follow(name: &Name, socket: &UnixStream, say: Say<'_>) -> Result<Moved> {
    let mut reader = BufReader::new(socket);
    let mut moved = None;
    let mut has_begun = false;
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(MESSAGE_MAX).read_until(b'\n', &mut line) {
            Ok(0) => return moved.ok_or_else(|| has_ended(name)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return moved.map_or_else(|| Err(is_silent(name)), |_| Err(does_not_end(name)));
            }
            // The monitor ends with a guest that has moved.
            Err(error) => return moved.ok_or_else(|| has_ended(name).hint(error.to_string())),
        }
        // A line that is cut off or is no JSON is the kernel's or another program's.
        let Ok(message) = serde_json::from_slice::<Value>(&line) else { continue };
        if !has_begun {
            has_begun = true;
            wait(socket, None)?;
        }
        if let Some(error) = message.get("error") {
            return Err(refused(name, error));
        }
        if let Some(report) = message.get("report") {
            moved = Some(Moved { name: name.clone(), report: report.clone(), text: text_of(&message) });
            wait(socket, Some(BEGINS_WITHIN))?;
        }
        if let Some(event) = message.get("event") {
            match say.format {
                Format::Json => print(&format!("{event}\n")),
                Format::Text => print(&(text_of(&message) + "\n")),
            };
        }
    }
}

/// Sets a limit for the next message.
fn wait(socket: &UnixStream, limit: Option<Duration>) -> Result<()> {
    socket.set_read_timeout(limit).map_err(|error| {
        Error::new(Exit::Failed, format!("cannot wait for the guest's answer: {error}"))
            .hint("the move goes on: the destination's console says how")
    })
}

/// Returns a text of the guest's without control characters, which a terminal of the host might obey.
fn plain(text: &Value) -> String {
    let text = text.as_str().unwrap_or_default();
    text.chars().filter(|one| *one == '\n' || !one.is_control()).collect()
}

fn text_of(message: &Value) -> String {
    plain(message.get("text").unwrap_or(&Value::Null))
}

fn refused(name: &Name, error: &Value) -> Error {
    let part = |key| error.get(key).map(plain);
    let message = part("message").unwrap_or_default();
    let refused = Error::new(Exit::Failed, format!("{name} has not moved, and goes on here: {message}"));
    match part("hint") {
        Some(hint) => refused.hint(hint),
        None => refused,
    }
}

fn is_silent(name: &Name) -> Error {
    Error::new(Exit::Failed, format!("nothing in {name} takes the order"))
        .hint("its driver may be of an earlier version: type `mercury migrate` in the guest")
}

fn has_ended(name: &Name) -> Error {
    Error::new(Exit::Failed, format!("{name} has ended, and has not said that it has moved"))
        .hint("the destination's console says if the machine runs there")
}

fn does_not_end(name: &Name) -> Error {
    Error::new(Exit::Failed, format!("{name} runs at the destination, and has not ended here"))
        .hint(format!("end it: `mercury guests stop {name}`"))
}

/// A guest that runs at its destination.
#[derive(Debug, Serialize)]
pub struct Moved {
    name: Name,
    #[serde(flatten)]
    report: Value,
    #[serde(skip)]
    text: String,
}

impl Render for Moved {
    fn render(&self, text: &mut Text) {
        self.text.lines().for_each(|line| text.line(line));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_migration::session::Receiver;
    use std::thread;

    fn args(options: &[&str]) -> MigrateArgs {
        let (_, token) = Receiver::new(Duration::from_secs(60)).expect("a receiver");
        MigrateArgs {
            name: "node7".parse().expect("a name"),
            host: "10.9.0.4".into(),
            token: TokenArg { key: Some(token.to_string()) },
            options: options.iter().map(|&word| word.to_owned()).collect(),
        }
    }

    fn said(lines: &'static [u8]) -> Result<Moved> {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        ours.set_read_timeout(Some(Duration::from_millis(200))).expect("a limit");
        let guest = thread::spawn(move || {
            theirs.write_all(lines).expect("a reader");
            if lines.is_empty() {
                thread::sleep(Duration::from_millis(400));
            }
        });
        let name = "node7".parse().expect("a name");
        let result = follow(&name, &ours, Say { format: Format::Text, name: "guests migrate" });
        guest.join().expect("the guest");
        result
    }

    #[test]
    fn an_order_is_words_that_end_with_nul() {
        let args = args(&["--max-downtime", "2s"]);
        let token = args.token.key.clone().expect("a token");
        let expected = format!(
            "MERCURY_KEY={token}\0migrate\0--ordered\0--without-tombstone\0--max-downtime\0\
             2s\0--\010.9.0.4\0\0"
        );
        assert_eq!(order(&args).expect("an order"), expected.as_bytes());
    }

    #[test]
    fn orders_that_cannot_be_are_refused() {
        let long = "x".repeat(ORDER_MAX);
        for options in [&[""][..], &["a\0b"], &[&long], &["x"; WORDS_MAX]] {
            assert_eq!(order(&args(options)).expect_err("refused").exit, Exit::Usage);
        }
        let without = MigrateArgs { token: TokenArg { key: Some("word".into()) }, ..args(&[]) };
        assert_eq!(order(&without).expect_err("refused").exit, Exit::Usage);
    }

    #[test]
    fn the_guest_is_followed_to_its_end() {
        let moved = said(
            b"noise\n{\"begun\":true}\n{\"event\":{\"event\":\"stops\"},\"text\":\"still\"}\n\
              {\"report\":{\"attempt\":\"7\"},\"text\":\"moved\\u001b[2J\"}\n",
        );
        let moved = moved.expect("a move");
        assert_eq!(moved.text, "moved[2J");
        let json = serde_json::to_string(&moved).expect("JSON");
        assert_eq!(json, r#"{"name":"node7","attempt":"7"}"#);
    }

    #[test]
    fn a_guest_that_has_not_moved_says_why() {
        let error = said(b"{\"error\":{\"message\":\"no room\",\"hint\":\"find some\"}}\n");
        let error = error.expect_err("refused");
        assert!(error.message.contains("goes on here: no room"), "{error}");
        assert_eq!(error.hint.as_deref(), Some("find some"));
        assert!(said(b"{\"begun\":true}\n").expect_err("an end").message.contains("has not said"));
        assert!(said(b"").expect_err("silence").message.contains("takes the order"));
    }
}
