//! Routes of sessions.

use super::Role::Client;
use super::{Group, delete, get, post};
use crate::api::sessions::{
    ForkSession, OpenSession, RewindSession, Session, SessionClosed, SessionList,
    SglangCloseSession, SglangOpenSession,
};
use crate::handlers::sessions;

/// The rows.
pub(super) fn group() -> Group {
    let routes = vec![
        post("/v1/sessions", Client, sessions::open)
            .described("openSession", "Open a session")
            .takes::<OpenSession>()
            .replies::<Session>()
            .fails(&[404, 409, 429]),
        get("/v1/sessions", Client, sessions::list)
            .described(
                "listSessions",
                "The client's sessions, on a server with API keys or tenants",
            )
            .replies::<SessionList>()
            .fails(&[403]),
        get("/v1/sessions/{id}", Client, sessions::get)
            .described("retrieveSession", "A session, and the size of the prefix that it holds")
            .replies::<Session>()
            .fails(&[404]),
        delete("/v1/sessions/{id}", Client, sessions::close)
            .described("closeSession", "Close a session and release the blocks that it holds")
            .replies::<SessionClosed>()
            .fails(&[404]),
        post("/v1/sessions/{id}/fork", Client, sessions::fork)
            .described("forkSession", "Open a session that continues a prefix of this one")
            .takes::<ForkSession>()
            .replies::<Session>()
            .fails(&[404, 409, 429]),
        post("/v1/sessions/{id}/rewind", Client, sessions::rewind)
            .described("rewindSession", "Take a session back to a prefix of its conversation")
            .takes::<RewindSession>()
            .replies::<Session>()
            .fails(&[404, 409]),
        post("/open_session", Client, sessions::sglang_open)
            .described("openSglangSession", "Open a session, in SGLang's form; the reply is its id")
            .takes::<SglangOpenSession>()
            .replies::<String>()
            .fails(&[409, 429]),
        post("/close_session", Client, sessions::sglang_close)
            .described("closeSglangSession", "Close a session, in SGLang's form")
            .takes::<SglangCloseSession>()
            .replies::<SessionClosed>()
            .fails(&[404]),
    ];
    let description = "Conversations whose prefix stays cached between their turns.";
    Group { name: "Sessions", description, routes }
}
