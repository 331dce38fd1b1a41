package vorrang

import (
	"errors"
	"slices"

	"github.com/vorrang/vorrang/clients/go/vorrangv1"
)

// changes are the changes of priority of one request that wait for the server's answer; it answers them in their order.
//
// A change that was lost with its link is said again on the next one, for nobody can know whether the server had heard
// it. So the request may be answered once more than was asked; an answer that can't belong to the oldest change is
// passed over then.
type changes struct {
	waiting []*change
	strays  int // answers that may still come to what was said on links that are lost
}

// change is one of them.
type change struct {
	priority Priority
	answer   chan acknowledgement // has room for the one that comes
	link     *link                // that was told last; nil while none was
	repeated bool
	left     bool // nobody waits for the answer any more
}

// acknowledgement is the answer to a change of priority.
type acknowledgement struct {
	event PriorityChanged
	err   error
}

func newChange(priority Priority) *change {
	return &change{priority: priority, answer: make(chan acknowledgement, 1)}
}

func (c *change) frame(requestID string) *vorrangv1.SessionRequest {
	command := &vorrangv1.ReprioritizeCommand{RequestId: requestID, Priority: c.priority.wire()}
	return &vorrangv1.SessionRequest{Command: &vorrangv1.SessionRequest_Reprioritize{Reprioritize: command}}
}

// answered takes a new priority in, which may also be an operator's.
func (c *changes) answered(event PriorityChanged) {
	isAnothers := len(c.waiting) == 0 || !event.Capped && !c.waiting[0].priority.mayBecome(event.Level)
	if c.strays > 0 && isAnothers {
		c.strays--
		return
	}
	c.next(acknowledgement{event: event})
}

// rejected says that the server did not obey; the request has not ended.
func (c *changes) rejected(err *Error) {
	// What was said again was too late, but the answer to what was said first may come before the end of the request.
	if len(c.waiting) > 0 && c.waiting[0].repeated && errors.Is(err, ReasonUnknownRequest) {
		return
	}
	c.next(acknowledgement{err: err})
}

// end answers all of them, for nothing more will come.
func (c *changes) end(err error) {
	for len(c.waiting) > 0 {
		c.next(acknowledgement{err: err})
	}
}

// leave says that nobody waits for a change any more.
func (c *changes) leave(change *change) {
	change.left = true
	if change.link == nil {
		c.withdraw(change)
	}
}

// withdraw takes a change back that the server was not told of.
func (c *changes) withdraw(change *change) {
	if index := slices.Index(c.waiting, change); index >= 0 {
		c.waiting = slices.Delete(c.waiting, index, index+1)
	}
}

// unsaid are the frames of what a link was not told; they have to be sent on it.
func (c *changes) unsaid(requestID string, link *link) []*vorrangv1.SessionRequest {
	var frames []*vorrangv1.SessionRequest
	c.waiting = slices.DeleteFunc(c.waiting, func(change *change) bool {
		if change.link == link {
			return false
		}
		if change.link != nil {
			change.repeated = true
			c.strays++
		}
		if change.left {
			return true
		}
		change.link = link
		frames = append(frames, change.frame(requestID))
		return false
	})
	return frames
}

func (c *changes) next(answer acknowledgement) {
	if len(c.waiting) > 0 {
		c.waiting[0].answer <- answer
		c.waiting = slices.Delete(c.waiting, 0, 1)
	}
}
