//! Manual pages and shell completions, from the definition of the command line.

use crate::manual;
use clap::{Arg, Args, Command, ValueEnum};
use clap_complete::{Shell, generate_to};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    explain::{self, Entry},
};
use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Kind of files to generate
    pub what: Generated,
    /// Folder to write to
    pub directory: PathBuf,
}

/// The kinds of files that can be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Generated {
    /// Manual pages
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

/// Writes the files that `args` asks for, from the command line's definition.
///
/// # Errors
///
/// Returns an error if a file cannot be written.
pub fn run(args: &GenerateArgs, definition: Command) -> Result<Exit> {
    let result = match args.what {
        Generated::Man => man(definition, &args.directory),
        Generated::Completions => completions(&definition, &args.directory),
    };
    result.map(|()| Exit::Done).map_err(|error| {
        Error::new(Exit::Failed, format!("writing to {} failed: {error}", args.directory.display()))
            .hint("name a directory that can be written")
    })
}

/// Writes a page for the command and one for each of its visible subcommands.
pub fn man(mut definition: Command, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    definition.build();
    page(&definition, directory, "mercury")
}

fn page(command: &Command, directory: &Path, name: &str) -> io::Result<()> {
    let file = format!("{}.{}", name.replace(' ', "-"), manual::SECTION);
    fs::write(directory.join(file), manual::render(command, name)?)?;
    let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(visible)
        .try_for_each(|sub| page(sub, directory, &format!("{name} {}", sub.get_name())))
}

/// Writes the completions of the common shells.
pub fn completions(definition: &Command, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut command = definition.clone();
        command.build();
        let file = generate_to(shell, &mut offered(&command), "mercury", directory)?;
        if shell == Shell::Fish {
            OpenOptions::new().append(true).open(file)?.write_all(fish_codes().as_bytes())?;
        }
    }
    Ok(())
}

/// Formats the codes for `mercury explain`: clap_complete lets fish complete values of options, and
/// not of arguments.
fn fish_codes() -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'"));
    let line = |entry: &Entry| {
        let [code, meaning] = [entry.code.name(), entry.meaning].map(quoted);
        format!(
            "complete -c mercury -n \"__fish_mercury_using_subcommand explain\" -f -a {code} -d {meaning}\n"
        )
    };
    explain::TABLE.iter().map(line).collect()
}

/// Returns the command without hidden parts, which the shells would offer otherwise: its
/// subcommands and options, as far as completions show them.
fn offered(command: &Command) -> Command {
    let about = command.get_about().cloned().unwrap_or_default();
    let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    let built_in = |arg: &&Arg| matches!(arg.get_id().as_str(), "help" | "version");
    let arguments = command.get_arguments().filter(|arg| !arg.is_hide_set() && !built_in(arg));
    Command::new(command.get_name().to_owned())
        .about(about)
        .disable_version_flag(command.get_version().is_none())
        .version(command.get_version().unwrap_or_default().to_owned())
        .args(arguments.map(shown))
        .subcommands(visible.map(offered))
}

/// Returns an option or argument by itself: completions do not know which ones go together.
fn shown(arg: &Arg) -> Arg {
    let mut shown = Arg::new(arg.get_id().clone())
        .action(arg.get_action().clone())
        .value_parser(arg.get_value_parser().clone())
        .value_hint(arg.get_value_hint());
    shown = arg.get_long().into_iter().fold(shown, |shown, long| shown.long(long.to_owned()));
    shown = arg.get_short().into_iter().fold(shown, Arg::short);
    shown = arg.get_help().into_iter().fold(shown, |shown, help| shown.help(help.clone()));
    shown = arg.get_num_args().into_iter().fold(shown, Arg::num_args);
    shown = arg.get_index().into_iter().fold(shown, Arg::index);
    match arg.get_value_names() {
        Some(names) if arg.get_action().takes_values() => shown.value_names(names.to_vec()),
        _ => shown,
    }
}
