// Package vorrang is the Go client of Vorrang, an LLM inference server that schedules traffic of mixed priority.
//
// A [Client] is a connection. [Client.Generate] and [Client.GenerateStream] are single calls; [Client.Session]
// opens the main way in: one bidirectional stream that carries many requests, each a [Stream] of typed events,
// with live control of them.
//
// The package knows the wire alone: what a priority means, and who waits for whom, is the server's to say.
package vorrang
