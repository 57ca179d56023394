//! `mercury disco`: many machines that begin as copies of one, and share the memory that they do not write.

mod asleep;
mod client;
mod folder;
mod host;
mod job;
mod keeper;
mod map;
mod policy;
mod protocol;
mod server;

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Format, Render, Text},
    say::Say,
};
use mercury_guests::Name;
use mercury_hosted::{run::Options, template::Template};
use mercury_hosted_options::disco::{DiscoCommand, TemplateArgs};
use serde::Serialize;

use self::{
    client::Outcome,
    folder::{Folder, LOG, TemplateStatus},
    server::Server,
};
use crate::{options, refused};

/// The time between two looks if a template is ready.
const MOMENT: Duration = Duration::from_millis(20);

/// Returns the command's name for messages.
#[must_use]
pub fn name(command: &DiscoCommand) -> &'static str {
    match command {
        DiscoCommand::Template(_) => "disco template",
        DiscoCommand::Run(_) => "disco run",
        DiscoCommand::Fork(_) => "disco fork",
        DiscoCommand::Save(_) => "disco save",
        DiscoCommand::Resize(_) => "disco resize",
        DiscoCommand::Sleep(_) => "disco sleep",
        DiscoCommand::Wake(_) => "disco wake",
        DiscoCommand::List => "disco list",
        DiscoCommand::Map => "disco map",
        DiscoCommand::Console(_) => "disco console",
        DiscoCommand::Stop(_) => "disco stop",
        DiscoCommand::Rm(_) => "disco rm",
    }
}

/// Does what a command says.
///
/// # Errors
/// What has prevented it.
pub fn run(command: &DiscoCommand, say: Say<'_>) -> Result<Exit> {
    match command {
        DiscoCommand::Template(args) if args.foreground => serve(args),
        DiscoCommand::Template(args) => start(args).map(|ready| say.done(&ready)),
        DiscoCommand::Run(args) => match client::run(args)? {
            Outcome::Started(machines) => Ok(say.done(&machines)),
            Outcome::Ended(status) => std::process::exit(status),
        },
        DiscoCommand::Fork(args) => client::fork(args).map(|started| say.done(&started)),
        DiscoCommand::Save(args) => client::save(args).map(|saved| say.done(&saved)),
        DiscoCommand::Resize(args) => client::resize(args).map(|resized| say.done(&resized)),
        DiscoCommand::Sleep(args) => client::sleep(&args.machine).map(|asleep| say.done(&asleep)),
        DiscoCommand::Wake(args) => client::wake(&args.machine).map(|started| say.done(&started)),
        DiscoCommand::List => client::list().map(|listed| say.done(&listed)),
        DiscoCommand::Map => map::map().map(|map| say.done(&map)),
        DiscoCommand::Console(args) => client::console(&args.machine),
        DiscoCommand::Stop(args) => client::stop(&args.machine).map(|stopped| say.done(&stopped)),
        DiscoCommand::Rm(args) => client::remove(&args.template).map(|stopped| say.done(&stopped)),
    }
}

/// Becomes the process of a template.
fn serve(args: &TemplateArgs) -> Result<Exit> {
    let sleep_in = args.sleep_in.as_deref().map(folder_for_sleepers).transpose()?;
    let lock = claim(&args.name)?;
    let options = Options { restore: None, ..options(&args.run, None)? };
    let template = Template::new(&options, &args.file).map_err(refused)?;
    let file = args.file.canonicalize().unwrap_or_else(|_| args.file.clone());
    Server::new(template, (args.name.clone(), lock), file, options.memory, sleep_in)?.serve()
}

/// Checks the folder for machines that are asleep. Returns its whole path.
fn folder_for_sleepers(path: &Path) -> Result<PathBuf> {
    let wrong = |error: io::Error| {
        Error::new(Exit::Failed, format!("machines cannot sleep in {}: {error}", path.display()))
            .hint("--sleep-in needs a folder on a disk that this user can write to")
    };
    let whole = path.canonicalize().map_err(wrong)?;
    let probe = whole.join(format!(".mercury-{}", std::process::id()));
    File::create_new(&probe).and_then(|_| std::fs::remove_file(&probe)).map_err(wrong)?;
    Ok(whole)
}

/// Takes the template's folder.
fn claim(name: &Name) -> Result<File> {
    let folder = Folder::templates();
    let taken = folder.claim(name).map_err(|error| {
        let path = folder.of(name);
        let wrong = Error::new(Exit::Failed, format!("cannot make {}: {error}", path.display()));
        match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound => wrong
                .hint("log in as this user, or set XDG_RUNTIME_DIR to a folder that only this user can read"),
            _ => wrong.hint("make sure that the file system has room and can be written to"),
        }
    })?;
    taken.ok_or_else(|| {
        Error::new(Exit::State, format!("there is a template {name} already"))
            .hint(format!("choose another name, or end that one with `mercury disco rm {name}`"))
    })
}

/// Starts the process of a template in the background, and waits until it is ready.
fn start(args: &TemplateArgs) -> Result<Ready> {
    let failed = |error: io::Error| {
        Error::new(Exit::Failed, format!("cannot start the template's process: {error}"))
            .hint("the host limits your processes (ulimit -u), or has no memory")
    };
    // The name must be free, and the folder must exist for the log.
    drop(claim(&args.name)?);
    let path = Folder::templates().of(&args.name).with_extension(LOG);
    let log = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&path);
    let log = log.map_err(failed)?;
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(std::env::args_os().skip(1)).arg("--foreground");
    command.stdin(Stdio::null()).stdout(log.try_clone().map_err(failed)?).stderr(log);
    // SAFETY: The call takes nothing, and may be made after a fork.
    unsafe { command.pre_exec(|| rustix::process::setsid().map(drop).map_err(io::Error::from)) };
    let mut child = command.spawn().map_err(failed)?;
    let status = await_ready(&args.name, &mut child, &path);
    if status.is_err() {
        let _ = child.kill();
        let _ = child.wait();
        // Another template may have taken the name meanwhile.
        Folder::templates().remove_ended(&args.name);
    }
    let _ = std::fs::remove_file(path);
    status.map(|status| Ready { status })
}

fn await_ready(name: &Name, child: &mut Child, log: &Path) -> Result<TemplateStatus> {
    let folder = Folder::templates();
    loop {
        if let Some(status) = folder.find(name).map_err(|error| client::unreadable(&folder, &error))? {
            return Ok(status);
        }
        if child.try_wait().ok().flatten().is_some() {
            let said = std::fs::read_to_string(log).unwrap_or_default();
            return Err(because(&said));
        }
        thread::sleep(MOMENT);
    }
}

/// Makes an error of the template's own message.
fn because(said: &str) -> Error {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let is_hint = |line: &&&str| line.starts_with('→');
    let why = lines.iter().find(|line| !is_hint(line)).copied().unwrap_or("it has ended without a word");
    let why = why.strip_prefix("mercury disco template:").unwrap_or(why).trim();
    let hint = lines.iter().find(is_hint).map(|hint| hint.trim_start_matches('→').trim());
    Error::new(Exit::Failed, why).hint(hint.unwrap_or("start it with --foreground to see all that it says"))
}

/// A template that is ready.
#[derive(Debug, Serialize)]
struct Ready {
    #[serde(flatten)]
    status: TemplateStatus,
}

impl Render for Ready {
    fn render(&self, text: &mut Text) {
        let name = &self.status.name;
        text.line(format!("the template {name} is ready: `mercury disco run {name}` starts a machine"));
        if self.status.lost_machines > 0 {
            let lost = self.status.lost_machines;
            text.line(format!(
                "{lost} machines slept when the host restarted, and are lost: their files are removed"
            ));
        }
    }
}

/// Returns the format of a message that another program reads.
#[must_use]
pub fn format(is_json: bool, command: &DiscoCommand) -> Format {
    // The message of a template in the background becomes the error of the command that has started it.
    match command {
        DiscoCommand::Template(args) if args.foreground => Format::Text,
        _ if is_json => Format::Json,
        _ => Format::Text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_templates_message_becomes_an_error() {
        let error =
            because("mercury disco template: saved is damaged: it is not as it was written\n  → copy it\n");
        assert_eq!(error.message, "saved is damaged: it is not as it was written");
        assert_eq!(error.hint.as_deref(), Some("copy it"));
        assert_eq!(because("\n").message, "it has ended without a word");
    }
}
