//! `mercury guests migrate`: orders a guest to move to another machine.
//!
//! The order goes through the guest's monitor to the driver in the guest, which starts `mercury migrate`
//! there. That command answers by the same way, a line of JSON for each message. Each has the random name of
//! the order, so that answers to an earlier order mean nothing.

use super::find_awake;
use crate::shared::TokenArg;
use clap::Args;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Format, Render, Text},
    say::{Say, print},
};
use mercury_guests::{Name, Root};
use mercury_relocation::{migrate::pairing_token, plain, random::random};
use serde::Serialize;
use serde_json::Value;
use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

/// Longest silence of the guest.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Until the command in the guest has begun, and until a guest ends that has moved.
    begins: Duration,
    /// While the guest moves. The command gives a sign of life each 10 s.
    alive: Duration,
    /// From the time at which applications stand still: the command may wait for an operator's word.
    stands_still: Duration,
}

const LIMITS: Limits = Limits {
    begins: Duration::from_secs(60),
    alive: Duration::from_secs(300),
    stands_still: Duration::from_secs(1800),
};
/// Largest message of a guest, and largest order.
const MESSAGE_MAX: usize = 64 << 10;
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
    let number = random::<16>()?.map(|byte| format!("{byte:02x}")).concat();
    let order = order(args, &number)?;
    let guest = find_awake(root, &args.name)?;
    let name = &args.name;
    let unreachable = |error: io::Error| {
        Error::new(Exit::Failed, format!("cannot reach the monitor of {name}: {error}"))
            .hint("a monitor of an earlier version takes no orders: type `mercury migrate` in the guest")
    };
    let socket = UnixStream::connect(guest.orders()).map_err(unreachable)?;
    (&socket).write_all(&order).map_err(unreachable)?;
    follow(name, &socket, &number, LIMITS, say)
}

/// Returns the order: a variable of the environment and words, each with a NUL at its end, and a NUL.
fn order(args: &MigrateArgs, number: &str) -> Result<Vec<u8>> {
    let token = pairing_token(args.token.key.as_deref())?;
    let mut words = vec![format!("MERCURY_KEY={token}"), "migrate".into()];
    // Nothing but this host starts a guest, so no tombstone would be read.
    words.extend(["--ordered", number, "--without-tombstone"].map(String::from));
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
fn follow(name: &Name, socket: &UnixStream, number: &str, limits: Limits, say: Say<'_>) -> Result<Moved> {
    let mut reader = BufReader::new(socket);
    let mut moved = None;
    let (mut has_begun, mut limit, mut heard) = (false, limits.begins, Instant::now());
    let mut stands_still = false;
    loop {
        let mut line = Vec::new();
        match read_line(&mut reader, &mut line, heard + limit) {
            Ok(0) => return moved.ok_or_else(|| has_ended(name)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(match (moved, has_begun) {
                    (Some(_), _) => does_not_end(name),
                    (None, true) if stands_still => stands_in_doubt(name, limit),
                    (None, true) => says_no_more(name, limit),
                    (None, false) => is_silent(name),
                });
            }
            // The monitor ends with a guest that has moved.
            Err(error) => return moved.ok_or_else(|| has_ended(name).hint(error.to_string())),
        }
        // A line that is cut off or is no JSON is the kernel's or another program's.
        let Ok(message) = serde_json::from_slice::<Value>(&line) else { continue };
        if !is_answer(&message, number) {
            continue;
        }
        heard = Instant::now();
        if !has_begun {
            has_begun = true;
            limit = limits.alive;
        }
        if let Some(error) = message.get("error") {
            return Err(refused(name, error));
        }
        if let Some(report) = message.get("report") {
            moved = Some(Moved { name: name.clone(), report: report.clone(), text: text_of(&message) });
            limit = limits.begins;
        }
        if let Some(event) = message.get("event") {
            if event.get("event").and_then(Value::as_str) == Some("stops") {
                (limit, stands_still) = (limits.stands_still, true);
            }
            match say.format {
                Format::Json => print(&format!("{event}\n")),
                Format::Text => print(&(text_of(&message) + "\n")),
            };
        }
    }
}

/// Returns true if a message answers this order. The monitor refuses an order without its name.
fn is_answer(message: &Value, number: &str) -> bool {
    match message.get("order") {
        Some(order) => order.as_str() == Some(number),
        None => message.get("error").is_some(),
    }
}

/// Reads a line, or the first bytes of one that is too long. Returns its length: 0 after the last one.
///
/// # Errors
/// The line is not complete by then, or the socket fails.
fn read_line(reader: &mut BufReader<&UnixStream>, line: &mut Vec<u8>, end: Instant) -> io::Result<usize> {
    while line.len() < MESSAGE_MAX && line.last() != Some(&b'\n') {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        reader.get_ref().set_read_timeout(Some(left))?;
        let bytes = match reader.fill_buf() {
            Ok([]) => break,
            Ok(bytes) => bytes,
            Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind()) => {
                continue;
            }
            Err(error) => return Err(error),
        };
        let bytes = &bytes[..bytes.len().min(MESSAGE_MAX - line.len())];
        let count = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
        line.extend(&bytes[..count]);
        reader.consume(count);
    }
    Ok(line.len())
}

/// Returns a text of the guest's for a terminal of the host.
fn plain(text: &Value) -> String {
    plain::plain(text.as_str().unwrap_or_default())
}

fn text_of(message: &Value) -> String {
    plain(message.get("text").unwrap_or(&Value::Null))
}

fn refused(name: &Name, error: &Value) -> Error {
    let part = |key| error.get(key).map(plain);
    let message = part("message").unwrap_or_default();
    let (exit, what) = if error.get("busy") == Some(&Value::Bool(true)) {
        (Exit::Busy, "has not got this order")
    } else {
        (Exit::Failed, "has not moved, and goes on here")
    };
    let refused = Error::new(exit, format!("{name} {what}: {message}"));
    match part("hint") {
        Some(hint) => refused.hint(hint),
        None => refused,
    }
}

fn is_silent(name: &Name) -> Error {
    Error::new(Exit::Failed, format!("nothing in {name} takes the order"))
        .hint("its driver may be of an earlier version: type `mercury migrate` in the guest")
}

fn says_no_more(name: &Name, limit: Duration) -> Error {
    let text = format!("{name} has said nothing of its move for {} s, and runs here", limit.as_secs());
    Error::new(Exit::Failed, text).hint(format!(
        "`mercury migrate` may have been killed there: look at its console (`mercury guests console {name}`)"
    ))
}

/// The guest may have said `Commit`, so that this host does not know where it runs.
fn stands_in_doubt(name: &Name, limit: Duration) -> Error {
    let text = format!(
        "{name} has said nothing of its move for {} s. It stands still here, and may run at the destination",
        limit.as_secs()
    );
    Error::new(Exit::Failed, text).hint(format!(
        "if it does not run at the destination and never will, `mercury guests resume {name}` lets it go on \
         here; if it runs there, `mercury guests abandon {name}` ends it here. Its console asks the same \
         (`mercury guests console {name}`)"
    ))
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
        let guest = thread::spawn(move || {
            theirs.write_all(lines).expect("a reader");
            if !lines.ends_with(b"\n") {
                thread::sleep(Duration::from_millis(800));
            }
        });
        let name = "node7".parse().expect("a name");
        let [begins, alive, stands_still] = [200, 300, 400].map(Duration::from_millis);
        let limits = Limits { begins, alive, stands_still };
        let result = follow(&name, &ours, "5", limits, Say { format: Format::Text, name: "guests migrate" });
        guest.join().expect("the guest");
        result
    }

    #[test]
    fn an_order_is_words_that_end_with_nul() {
        let args = args(&["--max-downtime", "2s"]);
        let token = args.token.key.clone().expect("a token");
        let expected = format!(
            "MERCURY_KEY={token}\0migrate\0--ordered\0five\0--without-tombstone\0--max-downtime\0\
             2s\0--\010.9.0.4\0\0"
        );
        assert_eq!(order(&args, "five").expect("an order"), expected.as_bytes());
    }

    /// A guest that sends a byte now and then, and no end of a line, is not followed for ever.
    #[test]
    fn a_line_without_end_is_silence() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let guest = thread::spawn(move || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(3) && theirs.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let limit = Duration::from_millis(300);
        let limits = Limits { begins: limit, alive: limit, stands_still: limit };
        let begun = Instant::now();
        let name = "node7".parse().expect("a name");
        let say = Say { format: Format::Text, name: "guests migrate" };
        let error = follow(&name, &ours, "5", limits, say).expect_err("silent");
        assert!(error.message.contains("nothing in node7 takes the order"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        drop(ours);
        guest.join().expect("the guest");
    }

    #[test]
    fn orders_that_cannot_be_are_refused() {
        let long = "x".repeat(ORDER_MAX);
        for options in [&[""][..], &["a\0b"], &[&long], &["x"; WORDS_MAX]] {
            assert_eq!(order(&args(options), "5").expect_err("refused").exit, Exit::Usage);
        }
        let without = MigrateArgs { token: TokenArg { key: Some("word".into()) }, ..args(&[]) };
        assert_eq!(order(&without, "5").expect_err("refused").exit, Exit::Usage);
    }

    #[test]
    fn the_guest_is_followed_to_its_end() {
        let moved = said(
            b"noise\n{\"order\":\"5\",\"begun\":true}\n\
              {\"order\":\"5\",\"event\":{\"event\":\"stops\"},\"text\":\"still\"}\n\
              {\"order\":\"5\",\"report\":{\"attempt\":\"7\"},\"text\":\"moved\\u001b[2J\"}\n",
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
        let ended = said(b"{\"order\":\"5\",\"begun\":true}\n").expect_err("an end");
        assert!(ended.message.contains("has not said"));
        assert!(said(b"").expect_err("silence").message.contains("takes the order"));
    }

    #[test]
    fn a_guest_that_carries_out_another_order_is_not_said_to_go_on() {
        let error =
            said(b"{\"error\":{\"message\":\"another order\",\"busy\":true}}\n").expect_err("refused");
        assert_eq!(error.exit, Exit::Busy);
        assert!(!error.message.contains("goes on"), "{error}");
    }

    /// The answers of an earlier order are still on their way.
    #[test]
    fn answers_to_another_order_mean_nothing() {
        let stale = said(
            b"{\"order\":\"4\",\"report\":{\"attempt\":\"7\"},\"text\":\"moved\"}\n\
              {\"order\":\"4\",\"error\":{\"message\":\"no room\"}}\n{\"report\":{}}\n{\"begun\":true}\n{",
        );
        assert!(stale.expect_err("silence").message.contains("takes the order"));
    }

    #[test]
    fn a_command_that_was_killed_is_not_waited_for() {
        let begun = said(b"{\"order\":\"5\",\"begun\":true}\n{");
        let error = begun.expect_err("silence");
        assert!(error.message.contains("has said nothing"), "{error}");
        assert!(error.hint.expect("a hint").contains("guests console node7"));
        let still = said(
            b"{\"order\":\"5\",\"begun\":true}\n\
              {\"order\":\"5\",\"event\":{\"event\":\"stops\"},\"text\":\"still\"}\n{",
        );
        let error = still.expect_err("silence");
        assert!(error.message.contains("may run at the destination"), "{error}");
        assert!(!error.message.contains("runs here"), "{error}");
        assert!(error.hint.expect("a hint").contains("guests console node7"));
    }
}
